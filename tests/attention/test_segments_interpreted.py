"""Decode rows that share segments of keys, in Triton's interpreter: every row gets what it gets on its own."""

from __future__ import annotations

import os
import random
from functools import partial
from typing import Any

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("test_gpu_backends runs the compiled kernels here", allow_module_level=True)
pytest.importorskip("triton")
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined; without a GPU nothing else uses Triton

from attention_setup import Bench as AnyBench
from segment_trees import SegmentTree, random_tree

from nvcli.attention.forward_batch import BatchShape
from nvcli.attention.triton_backend import TritonBackend
from nvcli.kernels.triton.segment_work_list import LEVELS

Bench = partial(AnyBench, TritonBackend, max_shared_rows=32, num_tokens=3000)
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")  # the interpreter


@pytest.mark.parametrize(
    ("seed", "ratio", "head_dim", "block_size", "windows", "options"),
    [
        (0, 2, 32, 64, (None,), {}),
        (1, 3, 16, 16, (None, 50), {"has_sinks": True}),
        (2, 16, 16, 24, (70,), {"soft_cap": 0.7}),
        (3, 40, 16, 32, (None,), {}),
    ],
    ids=str,
)
def test_random_trees(
    seed: int, ratio: int, head_dim: int, block_size: int, windows: tuple[int | None, ...], options: dict[str, Any]
) -> None:
    rng = random.Random(seed)
    bench = Bench(num_kv_heads=2, ratio=ratio, head_dim=head_dim, block_size=block_size, windows=windows, **options)
    bench.leave_garbage(float("nan"))
    tree, requests = random_tree(
        bench, rng, num_segments=7, most_blocks=max(2, 100 // block_size), num_rows=rng.randint(12, 20)
    )
    step = tree.share(bench.batch(*((request, 1) for request in requests)))
    step.check(step.forward())


def test_requests_with_more_levels_than_are_read_once() -> None:
    """Behind the last level that counts, keys are each row's own; the plan lists every segment of the levels once, and
    a long one in several chunks."""
    bench = Bench(head_dim=16, block_size=16, num_kv_heads=1, ratio=2)
    tree = SegmentTree(bench)
    segments = [tree.segment(None, 40)]
    while len(segments) < LEVELS + 2:
        segments.append(tree.segment(segments[-1], 1))
    requests = [tree.request(segment, 5) for segment in segments for _ in range(2)]
    step = tree.share(bench.batch(*((request, 1) for request in requests), shape=BatchShape(decode_rows=16)))
    for _ in range(2):
        step.check(step.forward())
