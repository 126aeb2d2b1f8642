"""Products of many rows with weights of 4 bits on Hopper GPUs: the kernel simulated on the CPU, the instructions that
turn codes into numbers, and what the assembler says; on such a GPU the kernel itself."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from expert_cases import CLAMPED_SILU, FORMATS, GPT_OSS, error, of_held, share_of
from expert_cases import make as make_experts
from torch import Tensor

from gluon_simulator import SimulatedKernel, Simulator

pytest.importorskip("triton")

from hopper_products_compile import reports
from test_products import make_affine
from test_w4 import make

from kernel_device import DEVICE, HAS_GPU, INTERPRETED_MARKS, TOLERANCE, on_hopper
from nvcli.kernels.activation import ACTIVATE_AND_MUL
from nvcli.kernels.expert_types import ExpertWeights, Routes, W4Scales
from nvcli.kernels.experts import apply_experts
from nvcli.kernels.mxfp4 import numbers_of_codes, powers_of_scales
from nvcli.kernels.triton.products import experts, hopper_w4, hopper_w4_kernel, w4_codes
from nvcli.kernels.triton.products.product_launch import HopperW4Launch
from nvcli.kernels.w4 import part_halves
from nvcli.kernels.weight_formats import W4Format

pytestmark = INTERPRETED_MARKS


def factors(pairs: Tensor, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """What `_factors` gives to `numbers`."""
    if kind.startswith("affine"):
        scales, offsets = part_halves(pairs.view(1, -1))
        return scales.flatten(), pairs, offsets.flatten()
    return (pairs & ~0xFF).view(torch.float32), pairs, (pairs & 0xFF).float()


def numbers(words: Tensor, scales: Tensor, pairs: Tensor, zeros: Tensor, part: int, kind: str, dtype: object) -> Tensor:
    """What `_numbers` gives, in float32."""
    if kind == "affine in 8 bits":
        return (((words.int() >> (8 * part)) & 255) - 128) * scales[:, None] + zeros[:, None]
    codes = (words.int() >> (4 * part)) & 15
    if kind == "mxfp4":
        exponents = (pairs >> (8 * part)) & 255
        return numbers_of_codes(codes.to(torch.uint8)).float() * powers_of_scales(exponents)[:, None].float()
    if kind == "affine":
        return (codes - 8) * scales[:, None] + zeros[:, None]
    return (codes - zeros[:, None]) * scales[:, None]


@pytest.fixture
def simulated() -> Any:
    simulator = Simulator(hopper_w4_kernel, functions={"_factors": factors, "_numbers": numbers})
    with (
        patch.object(hopper_w4, "hopper_w4_kernel", SimulatedKernel(simulator, "hopper_w4_kernel")),
        patch.object(hopper_w4, "num_multiprocessors", lambda _: 3),
    ):
        yield


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("format", "rows", "columns", "num_rows", "launch"),
    [
        (W4Format("integer", 128), 192, 256, 5, HopperW4Launch(64, 1)),
        (W4Format("affine", 32), 448, 512, 130, HopperW4Launch(64, 3)),
        (W4Format("affine", 32), 256, 640, 130, HopperW4Launch(128, 2, num_parts=3)),
        (W4Format("integer", 128), 160, 256, 70, HopperW4Launch(64, 1, num_parts=2)),
        (W4Format("affine in 8 bits", 32), 192, 256, 70, HopperW4Launch(64, 2)),
        (W4Format("affine in 8 bits", 16), 192, 384, 70, HopperW4Launch(64, 1)),
    ],
)
def test_products(format: W4Format, rows: int, columns: int, num_rows: int, launch: HopperW4Launch) -> None:
    """Also of an odd number of blocks of rows."""
    if format.kind == "integer":
        words, scales, values = make(rows, columns, format)
    else:
        words, values, scales, _ = make_affine(format.kind, rows, columns, "cpu", format.group)
    x = torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(1))
    expected = F.linear(x, values)
    found = hopper_w4.linear(x, words, scales, format, launch)
    found = found.sum(0) if launch.num_parts > 1 else found
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if launch.num_parts == 1:
        for gate, activate_and_mul in ACTIVATE_AND_MUL.items():
            gated = hopper_w4.linear(x, words, scales, format, launch, gate=gate)
            torch.testing.assert_close(gated, activate_and_mul(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(HAS_GPU, reason="rows are sorted by a kernel that is interpreted only where there is no GPU")
@pytest.mark.usefixtures("simulated")
@pytest.mark.pairwise
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_others", [0, 2])
@pytest.mark.parametrize("blocks", [1, 3])
def test_experts(blocks: int, num_others: int, bias: bool) -> None:
    """With inputs that end within a tile, and experts of other ranks, whose pairs are left out."""
    case = make_experts(W4Format("mxfp4", 32), (4, 2, 160, 96), 90, biases=bias)
    if num_others:
        case = share_of(case, 1, 3)
    x, routes, words, scales, plain = case
    assert isinstance(scales, W4Scales)
    activation = GPT_OSS if bias else CLAMPED_SILU
    expected = of_held(case, apply_experts(x, routes, plain, activation))
    out = torch.full(expected.shape, torch.nan)
    experts.apply_experts(x, routes, words, scales, activation, out, HopperW4Launch(64, blocks))
    assert error(of_held(case, out), expected) < 1e-5


def assembled(code: str, *registers: int, dtype: torch.dtype) -> list[float]:
    """Run instructions on registers $1, $2, … of 32 bits, and return the two numbers of $0."""
    values = dict(zip(("$0", *(f"${place + 1}" for place in range(len(registers)))), (0, *registers), strict=True))

    def halves(bits: int) -> Tensor:
        return torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.int32).to(torch.int16).view(dtype).double()

    def bits(of: Tensor) -> int:
        low, high = (int(value) & 0xFFFF for value in of.to(dtype).view(torch.int16))
        return low | high << 16

    operations = {
        "shr.b32": lambda a, b: a >> b,
        "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
        "and.b32": lambda a, b: a & b,
        "lop3.b32": lambda a, b, c, table: {0xEA: a & b | c, 0x6A: a & b ^ c}[table],
        "mov.b32": lambda a: a,
        "sub": lambda a, b: bits(halves(a) - halves(b)),
        "mul": lambda a, b: bits(halves(a) * halves(b)),
        "fma.rn": lambda a, b, c: bits(halves(a) * halves(b) + halves(c)),
    }
    for instruction in re.sub(r"\{ \.reg .b32 [^;]*;|\}", "", code).split(";")[:-1]:
        name, operands = instruction.split(maxsplit=1)
        target, *sources = (one.strip() for one in operands.split(","))
        name = re.sub(r"\.b?f16x2", "", name)
        values[target] = operations[name](*(values[one] if one in values else int(one, 0) for one in sources))
    return halves(values["$0"]).tolist()


@pytest.mark.parametrize(("dtype", "bias"), [(torch.bfloat16, 128), (torch.float16, 1024)], ids=str)
def test_integers_are_rounded_once(dtype: torch.dtype, bias: int) -> None:
    codes = hopper_w4_kernel._BF16_INTEGERS if dtype == torch.bfloat16 else hopper_w4_kernel._F16_INTEGERS
    generator = torch.Generator().manual_seed(0)
    for part in range(4):
        for code in range(16):
            other, zero = (int(torch.randint(0, most, (), generator=generator)) for most in (16, 17))
            kept = (torch.rand((), generator=generator) / 50).view(torch.int32) & ~0xFF
            scale = kept.view(torch.float32)
            high = scale.to(dtype)
            twice = [int(value.to(dtype).view(torch.int16)) & 0xFFFF for value in (high, scale - high.float())]
            twice.append(int(torch.tensor(float(bias + zero)).to(dtype).view(torch.int16)) & 0xFFFF)
            word = code << 4 * part | other << 16 + 4 * part | 0x5A5A5A5A & ~(0xF000F << 4 * part)
            scales, low_scales, zeros = (65537 * bits for bits in twice)
            found = assembled(
                codes.value[part], word, scales, scales, low_scales, low_scales, zeros, zeros, dtype=dtype
            )
            expected = (torch.tensor([code - zero, other - zero]).double() * scale.double()).to(dtype)
            if dtype == torch.bfloat16:
                assert found == expected.tolist()
            else:  # half of a scale may be too small for float16
                torch.testing.assert_close(torch.tensor(found), expected.float(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_affine_numbers_are_rounded_once(dtype: torch.dtype, bits: int) -> None:
    """Those of the scale and the offset in a register."""
    codes = (w4_codes.BF16_AFFINE if dtype == torch.bfloat16 else w4_codes.F16_AFFINE).value
    generator, zero = torch.Generator().manual_seed(0), 1 << (bits - 1)
    for part in range(16 // bits):
        for code in range(1 << bits):
            other = (1 << bits) - 1 - code
            kept = (torch.randn(2, generator=generator) / 50).to(dtype)
            twice = [(int(value.view(torch.int16)) & 0xFFFF) * 65537 for value in kept]
            mask = ((1 << bits) - 1) * 65537 << bits * part
            word = (code | other << 16) << bits * part | 0x5A5A5A5A & ~mask
            found = assembled(
                codes[part + 4 * (bits == 8)], word, *(one for one in twice for _ in range(2)), dtype=dtype
            )
            scale, offset = kept.double()
            exact = torch.tensor([code - zero, other - zero]).double() * scale + offset
            error = (torch.tensor(found).double() - exact).abs()
            assert (error <= torch.finfo(dtype).eps * exact.abs()).all()


def test_numbers_of_mxfp4_are_exact() -> None:
    for part in range(4):
        for code in range(16):
            for exponent in (1, 60, 127, 128):
                other = 15 - code
                word = code << 4 * part | other << 16 + 4 * part | 0xA5A5A5A5 & ~(0xF000F << 4 * part)
                factor = (exponent + 126) * 8388736
                found = assembled(hopper_w4_kernel._FP4_NUMBERS.value[part], word, factor, factor, dtype=torch.bfloat16)
                numbers = numbers_of_codes(torch.tensor([code, other], dtype=torch.uint8)).double()
                assert found == (numbers * 2.0 ** (exponent - 127)).tolist()


def test_products_run_beside_other_work() -> None:
    """ptxas says so where it waits for each matrix product, which halves the speed; registers that are spilled in the
    loop cost as much."""
    for report, _ in reports("w4"):
        assert "Performance Loss" not in report
        (spilled,) = re.findall(r"(\d+) bytes spill stores", report)
        assert int(spilled) <= 400, "some are spilled around the loop, and next to none in it"


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "num_rows", "launch"),
    [
        (6144, 4096, 200, HopperW4Launch(128, 3)),
        (6144, 4096, 64, HopperW4Launch(64, 2, num_parts=3)),
        (960, 1152, 333, HopperW4Launch(128, 2)),
        (960, 1152, 333, HopperW4Launch(128, 1, num_parts=4)),
        (960, 1152, 1, HopperW4Launch(64, 3)),
    ],
)
def test_products_on_a_gpu(rows: int, columns: int, num_rows: int, launch: HopperW4Launch, dtype: torch.dtype) -> None:
    """The reference has weights rounded once to the type, as the kernel rounds them. Exact ones give others: where a
    gate is near 0, the error of its 4,096 rounded weights, times `up`, is more than a product's tolerance."""
    format = W4Format("integer", 128)
    words, scales, values = make(rows, columns, format)
    x = torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = F.linear(x.float(), values.to(dtype).float())
    on_device = (x.to(DEVICE), words.to(DEVICE), scales.to(DEVICE), format)
    found = hopper_w4.linear(*on_device, launch)
    found = found.sum(0) if launch.num_parts > 1 else found
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.cpu().float(), expected, rtol=tolerance, atol=tolerance)
    gated = hopper_w4.linear(*on_device, launch._replace(num_parts=1), gate="silu").cpu().float()
    two_steps = ACTIVATE_AND_MUL["silu"](expected.to(dtype)).float()
    torch.testing.assert_close(gated, two_steps, rtol=2 * tolerance, atol=2 * tolerance)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(
    "launch", [HopperW4Launch(64, 1), HopperW4Launch(64, 3), HopperW4Launch(128, 2), HopperW4Launch(128, 3)]
)
@pytest.mark.parametrize(
    "format", [FORMATS[name] for name in ("mxfp4", "groups of 128", "affine", "affine in 8 bits")], ids=str
)
def test_experts_on_a_gpu(launch: HopperW4Launch, format: W4Format) -> None:
    shape = (8, 2, 1024, 416) if format.kind == "mxfp4" else (8, 2, 1024, 384)
    x, routes, words, scales, plain = make_experts(format, shape, 1000, torch.bfloat16, biases=True)
    assert isinstance(scales, W4Scales)
    expected = apply_experts(x.float(), routes, plain, GPT_OSS)
    out = torch.full(expected.shape, torch.nan, dtype=x.dtype, device=DEVICE)
    experts.apply_experts(
        x.to(DEVICE),
        Routes(*(one.to(DEVICE) for one in routes[:2])),
        ExpertWeights(*(one.to(DEVICE) for one in words[:4])),
        scales._replace(gate_up=scales.gate_up.to(DEVICE), down=scales.down.to(DEVICE)),
        GPT_OSS,
        out,
        launch,
    )
    assert error(out.cpu(), expected) < 0.01
