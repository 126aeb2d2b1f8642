"""Requests whose prompts form a random tree, with the tables of the segments that they share."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from attention_setup import Bench, History, Step

from kernel_device import DEVICE, HAS_GPU
from nvcli.kernels.segment_tables import SegmentTables

# Compiled kernels multiply in bfloat16, and the interpreter has float32 alone.
shared_bench = partial(
    Bench,
    device=str(DEVICE),
    dtype=torch.bfloat16 if HAS_GPU else torch.float32,
    max_shared_rows=32,
    num_tokens=3000,
)


@dataclass
class Segment:
    """A run of whole blocks behind its parent's."""

    parent: Segment | None
    history: History
    """All tokens up to the segment's end."""
    begin: int
    number: int
    """0: it is not read once for all of its rows, nor is any behind it."""

    @property
    def end(self) -> int:
        return self.history.state.length


@dataclass
class SegmentTree:
    """Makes segments and requests that begin with them."""

    bench: Bench
    segments: list[Segment] = field(default_factory=list)
    rows: dict[int, tuple[History, Segment]] = field(default_factory=dict)
    """The row of each request, by its identity."""

    def segment(self, parent: Segment | None, num_blocks: int, *, is_shared: bool = True) -> Segment:
        history = self._behind(parent)
        begin = history.state.length
        self.bench.fill(history, num_blocks * self.bench.case.block_size)
        is_shared = is_shared and (parent is None or parent.number > 0)
        number = 1 + sum(segment.number > 0 for segment in self.segments) if is_shared else 0
        self.segments.append(Segment(parent, history, begin, number))
        return self.segments[-1]

    def request(self, segment: Segment, num_own: int) -> History:
        """Make a request with `num_own` tokens of its own behind a segment."""
        history = self._behind(segment)
        self.bench.fill(history, num_own)
        self.rows[id(history)] = history, segment
        return history

    def _behind(self, segment: Segment | None) -> History:
        history = History()
        if segment is not None:
            past = segment.history
            history.state.length = past.state.length
            for spec in self.bench.specs:
                group = spec.kv_group
                history.state.tables[group] = list(past.state.tables[group])
                history.keys[group], history.values[group] = list(past.keys[group]), list(past.values[group])
        return history

    def share(self, step: Step) -> Step:
        """Give a step the tables of the segments, and plan it with them."""
        num_groups, num_slots, _ = step.batch.block_tables.shape
        numbers = [segment.number for segment in self.segments]
        tables = SegmentTables.empty(num_groups, max(numbers), num_slots, self.bench.device)
        for segment in self.segments:
            if segment.number:
                parent = segment.parent.number if segment.parent else 0
                entry = torch.tensor([segment.begin, segment.end, parent], dtype=torch.int32)
                tables.segments[:, segment.number] = entry.to(self.bench.device)
        for (history, _), slot in zip(step.work, step.batch.slots.tolist(), strict=False):
            segment: Segment | None = self.rows[id(history)][1] if id(history) in self.rows else None
            while segment is not None and not segment.number:
                segment = segment.parent
            tables.slot_segments[:, slot] = segment.number if segment else 0
        batch = replace(step.batch, shape=replace(step.batch.shape, shares_segments=True), segments=tables)
        self.bench.backend.plan(batch)
        self.bench.backend.plan_on_device(batch)
        return replace(step, batch=batch)


def random_tree(
    bench: Bench, rng: random.Random, *, num_segments: int, most_blocks: int, num_rows: int
) -> tuple[SegmentTree, list[History]]:
    """Make a tree and requests behind its segments, some of which are not shared, and some requests without any."""
    tree = SegmentTree(bench)
    for _ in range(num_segments):
        parent = rng.choice([None, *tree.segments, *tree.segments[-2:]]) if tree.segments else None
        tree.segment(parent, rng.randint(1, most_blocks), is_shared=rng.random() < 0.85)
    requests = [
        tree.request(rng.choice(tree.segments), rng.choice([1, 3, rng.randint(1, 60)])) for _ in range(num_rows)
    ]
    for _ in range(2):
        requests.append(History())
        bench.fill(requests[-1], rng.randint(1, 90))
    rng.shuffle(requests)
    return tree, requests
