"""Products of many rows with FP8 weights on Hopper GPUs: the kernel simulated on the CPU, and what the assembler says;
on such a GPU the kernel itself."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gluon_simulator import SimulatedKernel, Simulator

pytest.importorskip("triton")

from expert_cases import CLAMPED_SILU, GPT_OSS, SILU, Case, Shape, error, of_held, routes_of, share_of
from expert_cases import make as make_experts
from hopper_products_compile import reports

from fp8_interpreter import exact_conversions
from kernel_device import DEVICE, INTERPRETED_MARKS, on_hopper
from nvcli.kernels import experts as reference
from nvcli.kernels.activation import ACTIVATE_AND_MUL, Activation
from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.expert_types import ExpertScales, ExpertWeights, Routes
from nvcli.kernels.fp8 import dequantise_weight, quantise, quantise_weight
from nvcli.kernels.fp8_types import FP8, FP8_MAX, QuantisedRows, numbers
from nvcli.kernels.triton.products import experts, hopper_fp8, hopper_fp8_kernel
from nvcli.kernels.triton.products.product_launch import HopperFP8Launch
from nvcli.kernels.weight_formats import FP8_BLOCK, FP8Scaling

pytestmark = INTERPRETED_MARKS
__all__ = ["exact_conversions"]
CASES: list[tuple[FP8Scaling, HopperFP8Launch]] = [
    ("channel", HopperFP8Launch(2, 2)),
    ("channel", HopperFP8Launch(2, 2, 2)),
    ("channel", HopperFP8Launch(2, 2, None)),
    ("channel", HopperFP8Launch(3, 1)),
    ("channel", HopperFP8Launch(3, 1, 4)),
    ("channel", HopperFP8Launch(2, 1, None)),
    ("block", HopperFP8Launch(3, 1)),
    ("block", HopperFP8Launch(2, 1)),
]


def exponents(numbers: Tensor) -> Tensor:
    return (numbers.view(torch.int32) + 0x7FFFFF) >> 23


def inverse_powers(exponents: Tensor) -> Tensor:
    return ((254 - exponents) << 23).to(torch.int32).view(torch.float32)


def clamped(gate: Tensor, up: Tensor, kind: hopper_fp8_kernel.HopperFP8Kind) -> Tensor:
    activation = kind.activation
    assert activation is not None
    if activation.kind == "clamped_silu":
        return F.silu(gate).clamp(max=activation.limit) * up.clamp(-activation.limit, activation.limit)
    gate = gate.clamp(max=activation.limit)
    return (
        gate
        * torch.sigmoid(activation.alpha * gate)
        * (up.clamp(-activation.limit, activation.limit) + activation.offset)
    )


@pytest.fixture
def simulated() -> Any:
    functions = {
        "_sigmoid": torch.sigmoid,
        "_clamped": clamped,
        "_exponents": exponents,
        "_inverse_powers": inverse_powers,
    }
    simulator = Simulator(hopper_fp8_kernel, functions=functions)
    hopper_fp8._kernel.cache_clear()
    with (
        patch.object(hopper_fp8, "hopper_fp8_kernel", SimulatedKernel(simulator, "hopper_fp8_kernel")),
        patch.object(hopper_fp8, "num_multiprocessors", lambda _: 3),
    ):
        yield
    hopper_fp8._kernel.cache_clear()


def make(rows: int, in_features: int, scaling: FP8Scaling) -> QuantisedRows:
    """Rows whose neighbours differ in size by powers of two."""
    generator = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.randint(-3, 4, (rows, in_features // 64), generator=generator)
    x = torch.randn(rows, in_features, generator=generator) * sizes.repeat_interleave(64, 1)
    return quantise(x, scaling)._replace(dtype=torch.bfloat16)


def make_weight(out_features: int, in_features: int, scaling: FP8Scaling) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return quantise_weight(torch.randn(out_features, in_features, generator=generator) / in_features**0.5, scaling)


def values_of(x: QuantisedRows) -> Tensor:
    scales = x.scales if x.scaling == "block" else x.scales[:, None].expand(-1, -(-x.shape[1] // FP8_BLOCK))
    return numbers(x.codes) * scales.repeat_interleave(FP8_BLOCK, 1)[:, : x.shape[1]]


def product_of(x: QuantisedRows, weight: tuple[Tensor, Tensor]) -> Tensor:
    return values_of(x) @ dequantise_weight(*weight).t()


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("scaling", "launch"), CASES)
def test_products(scaling: FP8Scaling, launch: HopperFP8Launch) -> None:
    """With rows, features and input features that end within a tile, and tiles within a unit."""
    x, weight = make(200, 704, scaling), make_weight(400, 704, scaling)
    out = torch.full((200, 400), torch.nan, dtype=torch.bfloat16)
    assert hopper_fp8.linear(x, *weight, launch, out) is out
    torch.testing.assert_close(out.float(), product_of(x, weight), rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("activation", "unit_tiles"), [("silu", 2), ("gelu_tanh", 1), ("silu", None)])
def test_gated_products(activation: Activation, unit_tiles: int | None) -> None:
    x, weight = make(200, 640, "channel"), make_weight(768, 640, "channel")
    expected = ACTIVATE_AND_MUL[activation](product_of(x, weight))
    found = hopper_fp8.gated_linear(
        x, *weight, HopperFP8Launch(2, 2, unit_tiles), activation=ExpertActivation(kind=activation)
    )
    assert found.scaling == "channel"
    assert found.codes.dtype == FP8
    largest = expected.abs().amax(-1)
    assert (found.scales == 2.0 ** (largest * (1 / FP8_MAX)).log2().ceil()).float().mean() > 0.98, "rounded sums differ"
    # Half a step of a number, or of the least one that the row's scale leaves.
    bound = torch.maximum(expected.abs() * (2.0**-4 + 1e-3), found.scales[:, None] * 2.0**-9)
    assert ((values_of(found) - expected).abs() <= bound).all()


EXPERTS = (4, 2, 256, 128)
"""Experts, k, hidden, intermediate size."""


def experts_case(dtype: torch.dtype, num_tokens: int = 150, shape: Shape = EXPERTS, *, biases: bool = False) -> Case:
    """All tokens choose one expert, which has more rows than a tile."""
    case = make_experts("channel", shape, num_tokens, dtype, biases=biases)
    return case._replace(routes=routes_of(num_tokens, *shape[:2], favourite=1))


def multiply_experts(case: Case, launch: HopperFP8Launch, activation: ExpertActivation = SILU) -> Tensor:
    """Return the results of the kernel, in memory that holds NaN before."""
    out = case.x.new_full((case.routes.experts.shape[1], *case.x.shape), torch.nan)
    experts.apply_experts(*case[:2], case.weights, case.scales, activation, out, launch, quantises=True)
    return of_held(case, out)


def expected_of_experts(case: Case, activation: ExpertActivation = SILU) -> Tensor:
    return of_held(case, reference.apply_experts(case.x, case.routes, case.weights, activation, scales=case.scales))


@pytest.mark.usefixtures("simulated", "exact_conversions")
@pytest.mark.each
@pytest.mark.parametrize("unit_tiles", [2, None])
@pytest.mark.parametrize("held", [(0, 4), (1, 3)])
def test_experts(held: tuple[int, int], unit_tiles: int | None) -> None:
    """With a rank that holds some, an expert whose rows end within a tile, and one without rows."""
    case = share_of(experts_case(torch.float32), *held)
    found = multiply_experts(case, HopperFP8Launch(2, 2, unit_tiles), ExpertActivation(kind="gelu_tanh"))
    assert error(found, expected_of_experts(case, ExpertActivation(kind="gelu_tanh"))) < 0.04, "both round"


@pytest.mark.usefixtures("simulated", "exact_conversions")
def test_experts_with_biases_and_a_rest_of_features() -> None:
    """As those of gpt-oss, whose 2,880 features are no whole blocks."""
    case = experts_case(torch.float32, shape=(3, 2, 304, 208), biases=True)
    assert error(multiply_experts(case, HopperFP8Launch(2, 2, 2), GPT_OSS), expected_of_experts(case, GPT_OSS)) < 0.04


def test_products_run_beside_sums() -> None:
    """ptxas says so where it waits for each matrix product; registers that are spilled in the loop cost as much."""
    *all_but_last, with_biases = [report for report, _ in reports("fp8")]
    for report in all_but_last:
        assert re.findall(r"(\d+) bytes spill stores", report) == ["0"]
    assert "Performance Loss" not in "".join((*all_but_last, with_biases))
    (spilled,) = re.findall(r"(\d+) bytes spill stores", with_biases)
    assert int(spilled) <= 160, "some, behind the loop"


def to_device(x: QuantisedRows) -> QuantisedRows:
    return QuantisedRows(x.codes.to(DEVICE), x.scales.to(DEVICE), x.dtype)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [1, 512, 1000])
@pytest.mark.parametrize(("scaling", "launch"), CASES)
def test_products_on_a_gpu(scaling: FP8Scaling, launch: HopperFP8Launch, rows: int) -> None:
    x, weight = make(rows, 4096, scaling), make_weight(928, 4096, scaling)
    found = hopper_fp8.linear(to_device(x), *(one.to(DEVICE) for one in weight), launch).cpu().float()
    expected = product_of(x, weight)
    assert (found - expected).norm() < 0.004 * expected.norm()
    largest = expected.abs().max()
    assert ((found - expected).abs() < 0.02 * largest).all()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("unit_tiles", [1, 2, None])
@pytest.mark.parametrize("rows", [1, 512, 1000])
def test_gated_products_on_a_gpu(rows: int, unit_tiles: int | None) -> None:
    x, weight = make(rows, 4096, "channel"), make_weight(1024, 4096, "channel")
    expected = ACTIVATE_AND_MUL["silu"](product_of(x, weight))
    launch = HopperFP8Launch(2, 2, unit_tiles)
    gated = hopper_fp8.gated_linear(to_device(x), *(one.to(DEVICE) for one in weight), launch, activation=SILU)
    found = values_of(QuantisedRows(gated.codes.cpu(), gated.scales.cpu(), gated.dtype))
    assert (found - expected).norm() < 0.03 * expected.norm()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("unit_tiles", "most"), [(1, 0.001), (2, 0.003), (4, 0.008), (None, 0.08)])
def test_how_much_sums_of_one_sign_lose_on_a_gpu(unit_tiles: int | None, most: float) -> None:
    """FP8 units keep about 14 bits of what they add up, and cut off the rest. The rounding of results is no loss."""
    x = quantise(torch.rand(512, 4096, generator=torch.Generator().manual_seed(0)).bfloat16(), "channel")
    codes, scales = make_weight(256, 4096, "channel")
    weight = codes.float().abs().to(FP8), scales
    found = hopper_fp8.linear(to_device(x), *(one.to(DEVICE) for one in weight), HopperFP8Launch(3, 1, unit_tiles))
    lost = 1 - (found.cpu().float() / product_of(x, weight)).mean()
    assert -0.001 < lost < most


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("num_tokens", [10, 100, 3000])
@pytest.mark.parametrize("held", [(0, 8), (2, 6)])
@pytest.mark.parametrize("activation", [SILU, GPT_OSS, CLAMPED_SILU])
def test_experts_on_a_gpu(activation: ExpertActivation, num_tokens: int, held: tuple[int, int]) -> None:
    shape, biases = ((8, 2, 1024, 384), False) if activation == SILU else ((8, 2, 720, 720), True)
    case = share_of(experts_case(torch.bfloat16, num_tokens, shape, biases=biases), *held)
    expected = expected_of_experts(case, activation)
    on_gpu = Case(
        case.x.to(DEVICE),
        Routes(*(one.to(DEVICE) for one in case.routes)),
        ExpertWeights(*(one.to(DEVICE) if isinstance(one, Tensor) else one for one in case.weights)),
        ExpertScales(*(one.to(DEVICE) for one in case.scales or ())),
        case.values,
    )
    assert error(multiply_experts(on_gpu, HopperFP8Launch(2, 2, 2), activation).cpu(), expected) < 0.04
