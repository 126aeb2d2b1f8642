"""Decode rows that share segments of keys, in plain torch: every row gets what it gets on its own."""

from __future__ import annotations

import random

import pytest
import torch
from attention_setup import Bench
from segment_trees import SegmentTree, random_tree

from nvcli.attention.torch_backend import TorchBackend
from nvcli.kernels.fp8_types import FP8


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ratio", "block_size", "windows", "options"),
    [
        (2, 64, (None,), {}),
        (3, 16, (None, 50), {"has_sinks": True}),
        (1, 8, (70, None), {"soft_cap": 0.7}),
        (2, 16, (100,), {"kv_dtype": FP8}),
    ],
    ids=str,
)
def test_random_trees(
    seed: int, ratio: int, block_size: int, windows: tuple[int | None, ...], options: dict[str, object]
) -> None:
    rng = random.Random(seed)
    bench = Bench(
        TorchBackend, num_kv_heads=2, ratio=ratio, head_dim=32, block_size=block_size, windows=windows,
        num_tokens=6000, max_shared_rows=64, poison=0.0, **options,
    )  # type: ignore[arg-type]  # fmt: skip
    tree, requests = random_tree(
        bench, rng, num_segments=rng.randint(1, 8), most_blocks=max(2, 200 // block_size), num_rows=rng.randint(2, 24)
    )
    step = tree.share(bench.batch(*((request, 1) for request in requests)))
    for _ in range(2):
        step.check(step.forward())


def test_a_segment_is_read_once() -> None:
    """What one row reads of a segment is what all rows get: another row's block there is never looked at."""
    bench = Bench(TorchBackend, block_size=16, num_tokens=400, max_shared_rows=8)
    tree = SegmentTree(bench)
    segment = tree.segment(None, 3)
    requests = [tree.request(segment, 5) for _ in range(3)]
    step = tree.share(bench.batch(*((request, 1) for request in requests)))
    step.batch.block_tables[0, step.batch.slots[1:], :3] = bench.poison_block
    assert torch.isnan(bench.kv_cache.layer(1)[0][bench.poison_block]).all()
    step.check(step.forward())
