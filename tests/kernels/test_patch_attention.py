"""Attention within segments of patches: the kernel for Hopper GPUs simulated on the CPU, and itself on such a GPU."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from gluon_simulator import SimulatedKernel, Simulator

pytest.importorskip("triton")

from kernel_device import DEVICE, HAS_GPU, INTERPRETED_MARKS, TOLERANCE, on_hopper
from nvcli.kernels.patch_attention import Segments, attend_segments, make_segments
from nvcli.kernels.patch_types import Runs
from nvcli.kernels.triton.attention import hopper_patch_kernel, patch_attention

pytestmark = INTERPRETED_MARKS

RUNS: Runs = ((0, 2, 128), (256, 1, 260), (516, 3, 7))
"""Whole tiles, part of one behind whole ones, and less than one."""
NUM_PATCHES = 537


def reference(qkv: Tensor, runs: Runs) -> Tensor:
    return attend_segments(qkv.cpu().float(), Segments(runs, None))


@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 64), (3, 72), (1, 88), (1, 128)])
def test_attention(num_heads: int, head_dim: int) -> None:
    """Heads without a tail, and with those of each size, whole or in part."""
    qkv = torch.randn(NUM_PATCHES, 3, num_heads, head_dim)
    simulated = SimulatedKernel(Simulator(hopper_patch_kernel), "hopper_patch_kernel")
    with patch.object(hopper_patch_kernel, "hopper_patch_kernel", simulated):
        found = patch_attention.attend(qkv, patch_attention.list_tiles(RUNS))
    torch.testing.assert_close(found, reference(qkv, RUNS), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [*((size, torch.bfloat16) for size in (64, 72, 80, 96, 128)), (72, torch.float16)]
)
@pytest.mark.parametrize("runs", [RUNS, ((0, 1, 3072), (3072, 40, 64), (5632, 1, 1), (5633, 2, 1000))])
def test_attention_on_a_gpu(head_dim: int, runs: Runs, dtype: torch.dtype) -> None:
    assert HAS_GPU
    first, count, size = runs[-1]
    qkv = torch.randn(first + count * size, 3, 16, head_dim, device=DEVICE).to(dtype)
    segments = make_segments(runs, (16, head_dim), dtype, DEVICE)
    assert segments.tiles is not None
    found = attend_segments(qkv, segments)
    torch.testing.assert_close(found.cpu().float(), reference(qkv, runs), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(found, attend_segments(qkv, segments))
