"""The fused product of many rows against plain torch: interpreted in float32, and on a Hopper GPU at real sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.kernels import linear
from nvcli.kernels.activation import silu_and_mul
from nvcli.kernels.triton.gated_linear import gated_linear

IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
DTYPES = [torch.bfloat16, torch.float16] if HAS_GPU else [torch.float32]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ROWS = [1, 127, 1024, 5000, 8191] if HAS_GPU else [1, 70, 128, 300]
# Weights: [2 × out, in].
SHAPES = [(6144, 1024), (24576, 4096), (2048, 192)] if HAS_GPU else [(256, 64), (768, 192)]

pytestmark = [*MARKS, pytest.mark.skipif(HAS_GPU and not IS_HOPPER, reason="needs a Hopper GPU")]


def inputs(shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(num_rows, shape[1], generator=generator, device=DEVICE).to(dtype)
    weight = (torch.randn(shape, generator=generator, device=DEVICE) * shape[1] ** -0.5).to(dtype)
    return x, weight


def reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x.float(), weight.float()).chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_linear(shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> None:
    x, weight = inputs(shape, num_rows, dtype)
    out = gated_linear(x, weight)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), reference(x, weight), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [100, 1023, 1024, 4099])
def test_few_and_many_rows_agree_with_two_steps(num_rows: int) -> None:
    """Whichever kernel the number of rows chooses, the result is that of a product and an activation."""
    x, weight = inputs((6144, 1024), num_rows, torch.bfloat16)
    expected = silu_and_mul(F.linear(x, weight))
    torch.testing.assert_close(linear.gated_linear(x, weight), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
def test_a_graph_follows_its_inputs_and_no_number_of_rows_compiles_anew() -> None:
    from nvcli.kernels.triton import gated_linear as kernels

    x, weight = inputs((6144, 1024), 2048, torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gated_linear(x, weight)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated_linear(x, weight)
    compiled = kernels._gated_linear_kernel.device_caches[torch.cuda.current_device()][0]
    before = len(compiled)
    for num_rows in (2048, 2000, 1024, 17, 1):
        x.normal_()
        graph.replay()
        assert torch.equal(out[:num_rows], gated_linear(x[:num_rows], weight))
    assert len(compiled) == before
