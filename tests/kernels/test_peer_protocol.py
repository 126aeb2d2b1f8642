"""The order of words between ranks, by a model of it: no reader of shared memory ever sees another call's data.

Ranks are coroutines that take turns at random, some much faster than others; a rank's calls run one after another, the
rows of a call in any order, as kernels and their programs do. What is written is the number of the call, so a reader
knows what it ought to find. The buffers are those that `PeerMemory` hands out. The kernels themselves are in
`triton/peer_memory.py`: whoever changes their order of words changes it here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from nvcli.kernels.peer_memory import PeerLayout, PeerMemory
from nvcli.worker.distributed.stage import WHOLE, Stage

ROWS = 6


class Call(NamedTuple):
    kind: str
    number: int
    buffer: int
    num_rows: int


def calls_of(
    rng: random.Random, num_passes: int, *, stage: Stage = WHOLE, one_buffer: bool = False, one_place: bool = False
) -> list[Call]:
    """Passes of random sizes, as every rank of a stage makes them. With one buffer for all parts, or one place for all
    keys, they do not hold."""
    layout = PeerLayout(num_ranks=2, max_rows=ROWS, hidden_size=64, dtype=torch.float32)
    memory = PeerMemory(layout, [torch.zeros(layout.num_bytes, dtype=torch.uint8) for _ in range(2)], 0)
    base = memory.part(1, first=True).data_ptr()
    calls: list[Call] = []

    def add(kind: str, num_rows: int, *, first: bool = False) -> None:
        number = len(calls)
        place = (memory.part(1, first=first).data_ptr() - base) // layout.part_bytes
        buffer = 0 if one_buffer else place
        calls.append(Call("write parts", number, buffer, num_rows))
        if kind != "no sum":
            calls.append(Call(kind, number, buffer, num_rows))
        if kind == "two shots":
            calls.append(Call("read results", number, 0, num_rows))

    for _ in range(num_passes):
        num_rows, kind = rng.choice([1, 2, 5, ROWS]), rng.choice(["one shot", "two shots"])
        add("one shot" if stage.is_first else kind, num_rows, first=True)
        for _ in range(rng.randrange(1, 5)):
            add(kind, num_rows)
        if num_rows > 1 and rng.random() < 0.3:  # some rows go on behind the last attention
            add("one shot", num_rows - 1)
            add(rng.choice(["one shot", "two shots"]), num_rows - 1)
        if not stage.is_last:
            add("no sum", num_rows)
        elif num_keys := rng.choice([0, 1, ROWS]):
            for _ in range(rng.choice([1, 2])):  # what a graph has chosen may be chosen anew behind it
                calls.append(Call("keys", len(calls), int(one_place), num_keys))
    return calls


@dataclass
class Memory:
    """What one rank holds, by row."""

    parts: dict[tuple[int, int], int]
    flags: dict[tuple[int, int], int]
    done: dict[int, int]
    results: dict[int, int]
    words: dict[tuple[int, int, int], tuple[int, int]]
    epochs: dict[int, int]
    key_epochs: dict[int, int]


def program(all_ranks: list[Memory], rank: int, call: Call, row: int) -> Iterator[None]:
    """One row of a call on one rank; a turn ends at each `yield`."""
    mine, n = all_ranks[rank], len(all_ranks)
    at = (call.buffer, row)
    epoch = mine.epochs.get(row, 0) + 1

    def sum_parts() -> Iterator[None]:
        while any(mine.flags.get((row, peer), 0) < epoch for peer in range(n)):
            yield
        for peer in all_ranks:
            yield
            assert peer.parts[at] == call.number, "a part of another call"

    if call.kind == "write parts":
        mine.parts[at] = call.number
    elif call.kind == "read results":
        assert mine.results[row] == call.number, "a result of another call"
    elif call.kind == "one shot":
        for peer in all_ranks:
            peer.flags[row, rank] = epoch
            yield
        yield from sum_parts()
        mine.epochs[row] = epoch
    elif call.kind == "two shots":
        all_ranks[row % n].flags[row, rank] = epoch
        yield
        if row % n == rank:
            yield from sum_parts()
            for peer in all_ranks:
                peer.results[row] = call.number
                yield
            for peer in all_ranks:
                peer.done[row] = epoch
                yield
        while mine.done.get(row, 0) < epoch:
            yield
        mine.epochs[row] = epoch
    else:
        epoch = mine.key_epochs.get(row, 0) + 1
        place = 0 if call.buffer else epoch % 2
        for peer in all_ranks:
            peer.words[row, place, rank] = epoch, call.number
            yield
        for sender in range(n):
            while (found := mine.words.get((row, place, sender), (0, 0)))[0] < epoch:
                yield
            assert found == (epoch, call.number), "a key of another call"
            yield
        mine.key_epochs[row] = epoch


def run(num_ranks: int, calls: list[Call], rng: random.Random) -> None:
    ranks = [Memory({}, {}, {}, {}, {}, {}, {}) for _ in range(num_ranks)]
    waiting = [list(reversed(calls)) for _ in ranks]
    running: list[list[Iterator[None]]] = [[] for _ in ranks]
    weights = [1] * num_ranks
    while any(waiting) or any(running):
        if rng.random() < 0.002:
            weights = [rng.choice([1, 1, 5, 50]) for _ in ranks]
        (rank,) = rng.choices(range(num_ranks), weights)
        if not running[rank]:
            if waiting[rank]:
                call = waiting[rank].pop()
                running[rank] = [program(ranks, rank, call, row) for row in range(call.num_rows)]
            continue
        turn = rng.choice(running[rank])
        try:
            next(turn)
        except StopIteration:
            running[rank].remove(turn)


@pytest.mark.parametrize("stage", [WHOLE, Stage(0, 3), Stage(1, 3), Stage(2, 3)], ids=["whole", "first", "mid", "last"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_no_rank_reads_what_belongs_to_another_call(num_ranks: int, stage: Stage) -> None:
    for seed in range(12 if stage == WHOLE else 6):
        rng = random.Random(seed)
        run(num_ranks, calls_of(rng, 6, stage=stage), rng)


@pytest.mark.parametrize("wrong", ["one_buffer", "one_place"])
def test_the_model_finds_a_race(wrong: str) -> None:
    found = 0
    for seed in range(10):
        rng = random.Random(seed)
        try:
            run(2, calls_of(rng, 12, **{wrong: True}), rng)
        except AssertionError:
            found += 1
    assert found == 10
