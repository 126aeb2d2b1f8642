"""FP8 products of the rows of a decode step on Hopper GPUs: the kernel simulated on the CPU, and what the assembler
says; on such a GPU the kernel itself."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest
import torch

from gluon_simulator import SimulatedKernel, Simulator

pytest.importorskip("triton")

from hopper_products_compile import reports

from kernel_device import DEVICE, INTERPRETED_MARKS, captured, on_hopper
from nvcli.kernels import fp8 as reference
from nvcli.kernels.fp8_types import QuantisedRows
from nvcli.kernels.triton.products import hopper_fp8_decode, hopper_fp8_decode_kernel
from nvcli.kernels.triton.products.fp8_linear import fp8_linear
from nvcli.kernels.triton.products.product_launch import DecodeLaunch

pytestmark = INTERPRETED_MARKS
Product = tuple[QuantisedRows, torch.Tensor, torch.Tensor]


CPU = torch.device("cpu")


def make(num_rows: int, shape: tuple[int, int], device: torch.device) -> Product:
    """Rows, and a weight and its scales. Rows of both are of very different sizes."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.float32 if device == CPU else torch.bfloat16

    def rand(*shape: int) -> torch.Tensor:
        sizes = torch.logspace(-2, 2, shape[0], device=device).unsqueeze(1)
        return torch.randn(*shape, generator=generator, device=device) * sizes

    x, weight = rand(num_rows, shape[1]).to(dtype), rand(*shape)
    return reference.quantise(x, "channel"), *reference.quantise_weight(weight, "channel")


def assert_near(found: torch.Tensor, product: Product, tolerance: float) -> None:
    """Each row and each column is near that of plain torch."""
    x, codes, scales = product
    expected = (x.codes.float() * x.scales.unsqueeze(1)) @ reference.dequantise_weight(codes, scales).T
    for dim in (0, 1):
        assert ((found.float() - expected).norm(dim=dim) <= tolerance * expected.norm(dim=dim)).all()


@pytest.mark.parametrize(
    ("shape", "num_rows", "launch", "num_programs"),
    [
        ((384, 640), 50, DecodeLaunch(64), 3),
        ((384, 640), 50, DecodeLaunch(64), 2),
        ((304, 400), 130, DecodeLaunch(64), 4),
        ((304, 400), 130, DecodeLaunch(128, num_parts=3), 5),
        ((200, 1040), 200, DecodeLaunch(256, num_parts=4), 3),
        ((520, 400), 300, DecodeLaunch(256), 3),
        ((300, 272), 100, DecodeLaunch(256, num_parts=2), 4),
        ((80, 144), 1, DecodeLaunch(32, num_parts=8), 132),
    ],
)
def test_products(shape: tuple[int, int], num_rows: int, launch: DecodeLaunch, num_programs: int) -> None:
    """With strips of one block and of two, and with rows, features and inputs that end within a tile."""
    product = make(num_rows, shape, CPU)
    simulator = Simulator(hopper_fp8_decode_kernel, functions={"_wait_for_kernel_before": lambda: None})
    with (
        patch.object(
            hopper_fp8_decode, "hopper_fp8_decode_kernel", SimulatedKernel(simulator, "hopper_fp8_decode_kernel")
        ),
        patch.object(hopper_fp8_decode, "num_multiprocessors", lambda _: num_programs),
    ):
        found = fp8_linear(*product, launch)
        assert_near(found.sum(0) if found.dim() == 3 else found, product, 1e-5)
        if launch.num_parts == 1:
            out = torch.full_like(found, torch.nan)
            assert fp8_linear(*product, launch, out) is out
            assert torch.equal(out, found)


def test_no_rows() -> None:
    with patch.object(hopper_fp8_decode, "hopper_fp8_decode_kernel", None):
        assert hopper_fp8_decode.linear(*make(0, (128, 256), CPU), DecodeLaunch(64)).shape == (0, 128)


def test_the_last_round_is_shared_out() -> None:
    share_out = hopper_fp8_decode.share_out
    assert share_out(24576, 256, 256, 1, 132) == (1, 0, 2, 132, 60), "120 halves of rows follow"
    assert share_out(24576, 128, 128, 1, 132) == (1, 0, 1, 132, 120), "120 halves of features follow"
    assert share_out(4096, 256, 256, 4, 132) == (1, 0, 2, 32, 0), "there are 128 items, which is one round"
    assert share_out(6144, 256, 256, 1, 132).whole_strips == 0, "48 items would keep fewer programs busy than 96 halves"
    assert share_out(24576, 512, 256, 1, 132).whole_strips == 192
    assert share_out(24576, 300, 256, 1, 132)[:2] == (1, 1), "the last 44 rows are half of an item"


def test_what_is_compiled() -> None:
    """ptxas says so where it waits for each matrix product, which halves the speed; registers that are spilled in the
    loop cost as much. All loops count tiles but the one that brings the first ones: a loop that lost its count, which
    Triton takes to be constant if it is raised by more than one, would wait for the wrong tiles forever."""
    for report, without_count in reports("fp8_decode"):
        assert "Performance Loss" not in report
        (spilled,) = re.findall(r"(\d+) bytes spill stores", report)
        assert int(spilled) <= 100, "next to none"
        assert without_count == 1


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("num_rows", [1, 64, 100, 256, 300, 512])
@pytest.mark.parametrize(
    ("shape", "launch"),
    [
        ((6144, 4096), DecodeLaunch(32)),
        ((6144, 4096), DecodeLaunch(64)),
        ((20480, 4096), DecodeLaunch(256)),
        ((4096, 12288), DecodeLaunch(256, num_parts=4)),
        ((4096, 14336), DecodeLaunch(128, num_parts=2)),
        ((1040, 1040), DecodeLaunch(128)),
    ],
)
def test_products_on_a_gpu(shape: tuple[int, int], launch: DecodeLaunch, num_rows: int) -> None:
    """Each result is as near as FP8 units, which keep about 14 bits of a sum, and the 8 bits of bfloat16 allow."""
    x, codes, scales = make(num_rows, shape, DEVICE)
    found = fp8_linear(x, codes, scales, launch)
    assert found.dtype == (torch.bfloat16 if launch.num_parts == 1 else torch.float32)
    rows, weight = x.codes.float() * x.scales.unsqueeze(1), reference.dequantise_weight(codes, scales)
    expected = rows @ weight.T
    usual_size = rows.norm(dim=1).unsqueeze(1) * weight.norm(dim=1) / shape[1] ** 0.5
    rounding = 2.0**-8 if launch.num_parts == 1 else 0.0
    error = ((found.sum(0) if launch.num_parts > 1 else found).float() - expected).abs()
    assert (error <= rounding * expected.abs() + 3e-3 * usual_size).all()


@pytest.mark.gpu
@on_hopper
def test_a_product_waits_for_its_rows() -> None:
    """In a graph the kernel begins while the one that writes the rows still runs."""
    _, codes, scales = make(1, (4096, 4096), DEVICE)
    x = torch.randn(256, 4096, device=DEVICE, dtype=torch.bfloat16)

    def run() -> torch.Tensor:
        return fp8_linear(reference.quantise(x, "channel"), codes, scales, DecodeLaunch(256))

    graph, out = captured(run)
    for _ in range(20):
        x.normal_()
        graph.replay()
        found = out.clone()
        torch.cuda.synchronize()
        assert torch.equal(found, run())
