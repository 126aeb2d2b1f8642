"""Prefill chunks that share prefixes: every chunk gets what it gets on its own, with every backend that attends them
together. On a GPU the kernels are compiled; without one they run in Triton's interpreter."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_setup import History, Step
from segment_trees import SegmentTree, shared_bench
from simulated_hopper import SimulatedHopper

from combinations import full
from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.attention.backend import AttentionBackend
from nvcli.attention.forward_batch import BatchShape
from nvcli.attention.torch_backend import TorchBackend
from nvcli.attention.triton_backend import TritonBackend
from nvcli.kernels.chunk_prefixes import ChunkPrefixes
from nvcli.kernels.fp8_types import FP8

pytestmark = MARKS
Group = tuple[int, int, int]
"""The first chunk's row, the number of chunks, and the keys of the prefix."""


@pytest.fixture(params=[TorchBackend, TritonBackend, SimulatedHopper])
def backend(request: pytest.FixtureRequest) -> type[AttentionBackend]:
    kind: type[AttentionBackend] = request.param
    if kind is SimulatedHopper and HAS_GPU:
        pytest.skip("it runs compiled here")
    return kind


def share(step: Step, groups: list[Group]) -> Step:
    """Give a step the prefixes of these groups, and plan it with them."""
    num_rows = step.batch.shape.num_rows
    ends, group_ends = torch.zeros(num_rows, dtype=torch.int32), torch.arange(num_rows, dtype=torch.int32)
    for first, count, num_keys in groups:
        ends[first : first + count] = num_keys
        group_ends[first] = first + count
    prefixes = ChunkPrefixes(ends=ends.to(DEVICE), group_ends=group_ends.to(DEVICE))
    shape = replace(step.batch.shape, shares_prefixes=True)
    batch = replace(step.batch, shape=shape, prefixes=prefixes)
    step.bench.backend.plan(batch)
    step.bench.backend.plan_on_device(batch)
    return replace(step, batch=batch)


CASES: list[Any] = [
    full((2, 32, 64, (None,), {}), in_parts=True),
    full((4, 128, 64, (None,), {}), in_parts=True),
    (3, 16, 16, (None, 50), {"has_sinks": True}),
    full((5, 16, 24, (None,), {"soft_cap": 0.7}), in_parts=True),
    (2, 32, 64, (90, None), {"kv_dtype": FP8}),
    (5, 80, 16, (None,), {"value_dim": 64, "has_values": False}),
    (3, 48, 16, (None,), {"value_dim": 32}),
    full((4, 64, 64, (None,), {}), in_parts=True),  # on a Hopper GPU by a kernel of its own
    (5, 128, 128, (None,), {"soft_cap": 0.7, "has_sinks": True}),
    full((8, 256, 64, (None,), {}), in_parts=True),
]


@pytest.mark.parametrize(("ratio", "head_dim", "block_size", "windows", "options"), CASES, ids=str)
def test_groups_of_chunks(
    backend: type[AttentionBackend],
    ratio: int,
    head_dim: int,
    block_size: int,
    windows: tuple[int | None, ...],
    options: dict[str, Any],
) -> None:
    """Two trees of prefixes, chunks of 1 to 100 tokens behind them and more of their own, chunks that share nothing,
    decode rows, and padding; keys that earlier owners of blocks left, or that windows have left behind, do not
    count."""
    if backend is SimulatedHopper and (head_dim < 64 or block_size % 64 or windows != (None,)):
        pytest.skip("the usual kernels serve it")
    rng = random.Random(block_size + ratio)
    poison = 0.0 if backend.reads_behind_rows else float("nan")
    bench = shared_bench(
        backend, num_kv_heads=2, ratio=ratio, head_dim=head_dim, block_size=block_size, windows=windows, poison=poison,
        **options,
    )  # fmt: skip
    if not backend.reads_behind_rows:
        bench.leave_garbage(poison)
    tree = SegmentTree(bench)
    work: list[tuple[History, int]] = [(tree.request(tree.segment(None, 1), 3), 1) for _ in range(2)]
    groups: list[Group] = []

    def alone(count: int, past: int = 0) -> None:
        history = History()
        bench.fill(history, past)
        work.append((history, count))

    def group(counts: list[int], num_blocks: int) -> None:
        segment = tree.segment(None, num_blocks)
        deeper = tree.segment(segment, 1)
        groups.append((len(work), len(counts), segment.end))
        for count in counts:
            work.append((tree.request(rng.choice([segment, deeper]), rng.choice([0, 0, 1, rng.randint(1, 40)])), count))

    alone(5, 70)
    group([1, 2, 100, 7, 1], -(-130 // block_size))
    alone(20)
    group([3, 3], 1)
    alone(3, 9)
    count = sum(count for _, count in work) - 2
    shape = BatchShape(decode_rows=3, prefill_rows=len(work) + 2, prefill_tokens=count + 9)
    step = share(bench.batch(*work, shape=shape), [(first + 1, count, keys) for first, count, keys in groups])
    step.check(step.forward())


def test_a_prefix_is_read_for_all_chunks_of_a_group(backend: type[AttentionBackend]) -> None:
    """All chunks get the prefix that the first one reads; the others' blocks of it are never read."""
    bench = shared_bench(backend, block_size=64, num_tokens=1000, head_dim=64)
    tree = SegmentTree(bench)
    segment = tree.segment(None, 3)
    work = [(tree.request(segment, 2), 5) for _ in range(3)]
    step = bench.batch(*work)
    step.batch.block_tables[0, step.batch.slots[1:], :3] = bench.poison_block
    assert bench.kv_cache.layer(1)[0][bench.poison_block].isnan().all()
    step = share(step, [(0, 3, 192)])
    step.check(step.forward())
