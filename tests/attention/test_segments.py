"""Decode rows that share segments of keys: every row gets what it gets on its own, with every backend that reads
segments once for all. On a GPU the kernels are compiled; without one they run in Triton's interpreter."""

from __future__ import annotations

import random
from typing import Any

import pytest
from segment_trees import SegmentTree, random_tree, shared_bench
from simulated_hopper import SimulatedHopper

from combinations import full
from kernel_device import HAS_GPU, MARKS
from nvcli.attention.backend import AttentionBackend
from nvcli.attention.forward_batch import BatchShape
from nvcli.attention.torch_backend import TorchBackend
from nvcli.attention.triton_backend import TritonBackend
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.triton.attention.segment_work_list import LEVELS

pytestmark = MARKS


@pytest.fixture(params=[TorchBackend, TritonBackend, SimulatedHopper])
def backend(request: pytest.FixtureRequest) -> type[AttentionBackend]:
    kind: type[AttentionBackend] = request.param
    if kind is SimulatedHopper and HAS_GPU:
        pytest.skip("it runs compiled here")
    return kind


CASES: list[Any] = [
    full((2, 32, 64, (None,), {}), in_parts=True),
    (3, 16, 16, (None, 50), {"has_sinks": True}),
    (16, 16, 24, (70,), {"soft_cap": 0.7}),
    full((40, 16, 32, (None,), {}), in_parts=True),
    (2, 32, 64, (90, None), {"kv_dtype": FP8}),
    (2, 32, 8, (None,), {"kv_dtype": FP8, "soft_cap": 0.7}),
    (5, 80, 16, (None,), {"value_dim": 64, "has_values": False, "num_kv_heads": 1}),
    (3, 48, 16, (None, 50), {"value_dim": 32}),
    # On a Hopper GPU by a kernel of its own, beside the rows' own keys:
    full((3, 64, 64, (None,), {}), in_parts=True),
    (5, 128, 128, (None,), {"soft_cap": 0.7, "has_sinks": True}),
    (64, 64, 192, (None,), {"num_kv_heads": 1}),
]


@pytest.mark.parametrize(("ratio", "head_dim", "block_size", "windows", "options"), CASES, ids=str)
def test_random_trees(
    backend: type[AttentionBackend],
    ratio: int,
    head_dim: int,
    block_size: int,
    windows: tuple[int | None, ...],
    options: dict[str, Any],
) -> None:
    """Keys of blocks' earlier owners, and those that windows have left behind, must not count."""
    if backend is SimulatedHopper and (head_dim not in (64, 128) or windows != (None,) or "kv_dtype" in options):
        pytest.skip("the usual kernels serve it")
    rng = random.Random(block_size)
    poison = 0.0 if backend.reads_behind_rows else float("nan")
    bench = shared_bench(
        backend, ratio=ratio, head_dim=head_dim, block_size=block_size, windows=windows, poison=poison,
        **{"num_kv_heads": 2, **options},
    )  # fmt: skip
    if not backend.reads_behind_rows:
        bench.leave_garbage(poison)
    tree, requests = random_tree(
        bench, rng, num_segments=7, most_blocks=max(2, 100 // block_size), num_rows=rng.randint(12, 20)
    )
    step = tree.share(bench.batch(*((request, 1) for request in requests)))
    step.check(step.forward())


def test_requests_with_more_levels_than_are_read_once(backend: type[AttentionBackend]) -> None:
    """Behind the last level that counts, keys are each row's own; a long segment is cut into several chunks, and rows
    of padding have none."""
    bench = shared_bench(backend, head_dim=64, block_size=64, num_kv_heads=1, ratio=2)
    tree = SegmentTree(bench)
    segments = [tree.segment(None, 40)]
    while len(segments) < LEVELS.value + 2:
        segments.append(tree.segment(segments[-1], 1))
    requests = [tree.request(segment, 5) for segment in segments for _ in range(2)]
    step = tree.share(bench.batch(*((request, 1) for request in requests), shape=BatchShape(decode_rows=16)))
    for _ in range(2):
        step.check(step.forward())


def test_a_segment_is_read_once(backend: type[AttentionBackend]) -> None:
    """All rows get the segment that one row reads; the other rows' blocks of it are never read."""
    bench = shared_bench(backend, block_size=64, num_tokens=1000, head_dim=64)
    tree = SegmentTree(bench)
    segment = tree.segment(None, 3)
    requests = [tree.request(segment, 5) for _ in range(3)]
    step = tree.share(bench.batch(*((request, 1) for request in requests)))
    step.batch.block_tables[0, step.batch.slots[1:], :3] = bench.poison_block
    assert bench.kv_cache.layer(1)[0][bench.poison_block].isnan().all()
    step.check(step.forward())


def test_steps_without_segments_launch_what_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in which requests may share plans and attends steps in which none does as any other run."""
    bench = shared_bench(TritonBackend, block_size=16, num_tokens=400, head_dim=32)
    tree = SegmentTree(bench)
    requests = [tree.request(tree.segment(None, 3), 5) for _ in range(3)]
    assert isinstance(bench.backend, TritonBackend)
    monkeypatch.setattr(bench.backend, "_segmented", None)
    step = bench.batch(*((request, 1) for request in requests))
    step.check(step.forward())
