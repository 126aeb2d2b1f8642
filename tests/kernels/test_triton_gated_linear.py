"""The fused product of many rows against plain torch: interpreted in float32, and on a Hopper GPU at real sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.kernels import linear
from nvcli.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from nvcli.kernels.triton.gated_linear import choose_launch, gated_linear

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


def test_the_gate_may_go_through_gelu() -> None:
    x, weight = inputs(SHAPES[0], ROWS[0], DTYPES[0])
    expected = gelu_tanh_and_mul(F.linear(x.float(), weight.float()))
    tolerance = TOLERANCE[DTYPES[0]]
    out = gated_linear(x, weight, is_gelu=True)
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows_together", [1, 2, 3])
def test_every_tile_is_computed_whatever_the_order(rows_together: int) -> None:
    """More tiles of rows than are taken together, the last few fewer than that; no program may pass one over."""
    x, weight = inputs((768, 64), 600, DTYPES[0])
    out = gated_linear(x, weight, choose_launch(64)._replace(rows_together=rows_together))
    tolerance = TOLERANCE[DTYPES[0]]
    torch.testing.assert_close(out.float(), reference(x, weight), atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
def test_weights_that_do_not_divide_into_tiles_are_multiplied_in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's shard may have any number of rows: Qwen2.5-0.5B's has 1216 of each projection on four ranks."""
    monkeypatch.setattr(linear, "_MANY_ROWS", 64)
    for shape in ((2 * 1216, 896), (256, 96)):
        x, weight = inputs(shape, 200, DTYPES[0])
        tolerance = TOLERANCE[DTYPES[0]]
        out = linear.gated_linear(x, weight)
        torch.testing.assert_close(out.float(), reference(x, weight), atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [100, 2047, 2048, 4099])
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
