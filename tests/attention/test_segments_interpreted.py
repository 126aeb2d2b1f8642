"""Decode rows that share segments of keys, in Triton's interpreter: every row gets what it gets on its own."""

from __future__ import annotations

import os
import random
from functools import partial

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("test_gpu_backends runs the compiled kernels here", allow_module_level=True)
pytest.importorskip("triton")
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined; without a GPU nothing else uses Triton

from attention_setup import Bench as AnyBench
from segment_trees import random_tree

from nvcli.attention.triton_backend import TritonBackend

Bench = partial(AnyBench, TritonBackend, max_shared_rows=64, num_tokens=4000)
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")  # the interpreter


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("ratio", "head_dim", "block_size", "windows"),
    [(2, 64, 64, (None,)), (3, 32, 16, (None, 50)), (16, 16, 24, (70, None)), (40, 16, 32, (100,))],
    ids=str,
)
def test_random_trees(seed: int, ratio: int, head_dim: int, block_size: int, windows: tuple[int | None, ...]) -> None:
    rng = random.Random(seed)
    bench = Bench(num_kv_heads=2, ratio=ratio, head_dim=head_dim, block_size=block_size, windows=windows)
    bench.leave_garbage(float("nan"))
    tree, requests = random_tree(
        bench, rng, num_segments=rng.randint(1, 8), most_blocks=max(2, 200 // block_size), num_rows=rng.randint(2, 24)
    )
    step = tree.share(bench.batch(*((request, 1) for request in requests)))
    for _ in range(2):
        step.check(step.forward())
