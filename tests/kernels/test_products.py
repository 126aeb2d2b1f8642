"""The kernel of linear layers' products against plain torch: interpreted in float32, and on a GPU at real sizes."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8_interpreter import exact_conversions
from kernel_device import DEVICE, HAS_GPU, MARKS, captured
from nvcli.kernels import linear, w4
from nvcli.kernels import norm as norm_reference
from nvcli.kernels.activation import ACTIVATE_AND_MUL, Activation, silu_and_mul
from nvcli.kernels.fp8 import dequantise_weight, fp8_weight_linear, quantise, quantise_weight
from nvcli.kernels.fp8_types import FP8, Activations
from nvcli.kernels.triton.elementwise import norm
from nvcli.kernels.triton.products import linear as launches
from nvcli.kernels.triton.products import products
from nvcli.kernels.triton.products.product_launch import ProductLaunch, for_format
from nvcli.kernels.triton.products.products import multiply
from nvcli.kernels.weight_formats import FP8_BLOCK, NVFP4_BLOCK, W4Format

CAPABILITY = torch.cuda.get_device_capability() if HAS_GPU else (9, 0)
DTYPES = [torch.bfloat16, torch.float16] if HAS_GPU else [torch.float32]
TOLERANCE = 1e-2 if HAS_GPU else 1e-4
pytestmark = MARKS
__all__ = ["exact_conversions"]

Affine = Literal["affine", "affine in 8 bits"]
Kind = Literal["plain", "channel", "block", "128", "64", "32", "nvfp4"] | Affine
"""What shares a scale in a weight: nothing; a row or a block of codes in FP8; so many neighbours of 4 bits."""
SHAPES: dict[Kind, list[tuple[int, int]]] = (
    {
        "plain": [(6144, 1024), (1000, 200)],
        "channel": [(4096, 12288), (1008, 2064)],
        "block": [(6144, 4096), (1008, 2064)],
        "128": [(6144, 4096)],
        "64": [(1000, 4160)],
        "32": [(896, 864)],
        "nvfp4": [(6144, 4096), (1000, 4144)],
        "affine": [(6144, 4096), (1000, 4128)],
        "affine in 8 bits": [(6144, 4096), (1000, 4128)],
    }
    if HAS_GPU
    else {
        "plain": [(96, 64), (70, 40)],
        "channel": [(112, 400)],
        "block": [(176, 272)],
        "128": [(128, 256)],
        "64": [(64, 320)],
        "32": [(80, 160)],
        "nvfp4": [(96, 256), (80, 176)],
        "affine": [(80, 160)],
        "affine in 8 bits": [(96, 176)],
    }
)
CASES = [(kind, *shape) for kind, shapes in SHAPES.items() for shape in shapes]
LAUNCHES = {
    "few rows": ProductLaunch(16, 64, 128, 3, 4),
    "few features": ProductLaunch(64, 32, 128, 3, 4),
    "pointers": ProductLaunch(32, 32, 128, 3, 4, has_constants=True, x_by_tma=False, weight_by_tma=False),
    "pointers to rows": ProductLaunch(64, 64, 128, 3, 4, x_by_tma=False),
    "parts": ProductLaunch(16, 64, 128, 3, 4, num_parts=3),
    "many parts": ProductLaunch(64, 128, 128, 2, 4, num_parts=20 if HAS_GPU else 6),
    "tile after tile": ProductLaunch(32, 64, 128, 3, 4, rows_together=2, num_programs=1),
    "many rows": ProductLaunch(128, 128, 128, 2, 8, rows_together=8),
}


class Weight(NamedTuple):
    numbers: torch.Tensor
    values: torch.Tensor
    """What the numbers stand for, in float32."""
    scales: torch.Tensor | None = None
    format: W4Format | None = None


@lru_cache(maxsize=2)
def make_weight(kind: Kind, rows: int, columns: int, dtype: torch.dtype) -> Weight:
    generator = torch.Generator(DEVICE).manual_seed(0)
    values = torch.randn(rows, columns, generator=generator, device=DEVICE) * columns**-0.5
    if kind == "plain":
        weight = Weight(values.to(dtype), values.to(dtype).float())
    elif kind == "channel" or kind == "block":
        codes, scales = quantise_weight(values, kind)
        weight = Weight(codes, dequantise_weight(codes, scales), scales)
    elif kind == "nvfp4":
        format = W4Format("nvfp4", NVFP4_BLOCK).for_rows(rows // 2)
        codes = torch.randint(0, 16, (rows, columns), generator=generator, device=DEVICE, dtype=torch.uint8)
        scales = torch.randint(0, 127, (rows, columns // NVFP4_BLOCK), generator=generator, device=DEVICE)
        factors = (torch.rand(rows, generator=generator, device=DEVICE) + 0.5) * columns**-0.5 / 256
        joined = w4.join_block_scales(scales.to(torch.uint8).view(FP8), factors, format)
        words = w4.pack(codes, format)
        weight = Weight(words, w4.dequantise(words, joined, columns, format), joined, format)
    elif kind == "affine" or kind == "affine in 8 bits":
        weight = Weight(*make_affine(kind, rows, columns))
    else:
        format = W4Format("integer", int(kind)).for_rows(rows // 2)
        codes = torch.randint(0, 16, (rows, columns), generator=generator, device=DEVICE, dtype=torch.uint8)
        scales = torch.rand(rows, columns // format.group, generator=generator, device=DEVICE) + 0.5
        zeros = torch.randint(0, 17, scales.shape, generator=generator, device=DEVICE)
        joined = w4.join_scales(scales * columns**-0.5 / 4, zeros)
        words = w4.pack(codes, format)
        weight = Weight(words, w4.dequantise(words, joined, columns, format), joined, format)
    return weight


def make_affine(
    kind: Affine, rows: int, columns: int, device: torch.device | str = DEVICE, group: int = 32
) -> tuple[Tensor, Tensor, Tensor, W4Format]:
    """Make words, the numbers that they stand for, scales and the format, in groups as large as columns allow."""
    generator = torch.Generator(device).manual_seed(0)
    format = W4Format(kind, 16 if columns % group else group).for_rows(rows // 2)
    codes = torch.randint(0, 1 << format.bits, (rows, columns), generator=generator, device=device, dtype=torch.uint8)
    scales = torch.rand(rows, columns // format.group, generator=generator, device=device) + 0.5
    offsets = torch.randn(scales.shape, generator=generator, device=device)
    unit = columns**-0.5 / format.zero
    joined = w4.join_halves(scales * unit, offsets * unit * 3)
    words = w4.pack(codes, format)
    return words, w4.dequantise(words, joined, columns, format), joined, format


def launch_for(launch: ProductLaunch, weight: Weight) -> ProductLaunch:
    return launch if weight.format is None else for_format(launch, weight.format)


def make_rows(num_rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Return rows of very different sizes."""
    sizes = torch.logspace(-2, 2, num_rows).unsqueeze(1)
    return (torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(seed)) * sizes).to(DEVICE, dtype)


def activations(x: torch.Tensor, kind: Kind) -> list[tuple[Activations, torch.Tensor]]:
    """Return what may be multiplied by a weight of that kind, and the values."""
    found: list[tuple[Activations, torch.Tensor]] = [(x, x.float())]
    if (kind == "channel" or kind == "block") and CAPABILITY >= (8, 9):
        rows = quantise(x.cpu(), kind)
        scales = rows.scales.unsqueeze(1) if kind == "channel" else rows.scales.repeat_interleave(FP8_BLOCK, 1)
        values = rows.codes.float() * scales[:, : x.shape[1]]
        found.append((rows._replace(codes=rows.codes.to(DEVICE), scales=rows.scales.to(DEVICE)), values.to(DEVICE)))
    return found


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Each row is near the expected one, but for the last bit of numbers close to 0."""
    error = (found.double() - expected.double()).norm(dim=1)
    last_bits = torch.finfo(found.dtype).smallest_normal * torch.finfo(found.dtype).eps * found.shape[1] ** 0.5
    assert (error <= TOLERANCE * expected.double().norm(dim=1) + last_bits).all()


@pytest.mark.pairwise
@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
@pytest.mark.parametrize("num_rows", [1, 100, 700] if HAS_GPU else [1, 70])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "rows", "columns"), CASES)
def test_products(
    kind: Kind, rows: int, columns: int, dtype: torch.dtype, num_rows: int, launch: ProductLaunch
) -> None:
    """Every tile is computed once, however it is loaded, whichever operand comes first and whoever takes it."""
    weight = make_weight(kind, rows, columns, dtype)
    launch = launch_for(launch, weight)
    bias = torch.linspace(-1, 1, rows).to(DEVICE, dtype)
    for x, values in activations(make_rows(num_rows, columns, dtype), kind):
        expected = values.double() @ weight.values.double().T
        if launch.num_parts > 1:
            found = multiply(x, weight.numbers, launch, scales=weight.scales, format=weight.format, in_parts=True)
            assert found.dtype == torch.float32
            assert found.shape == (launch.num_parts, num_rows, rows)
            assert_near(found.sum(0), expected)
        else:
            out = torch.full((num_rows, rows), torch.nan, dtype=dtype, device=DEVICE)
            found = multiply(x, weight.numbers, launch, out, scales=weight.scales, format=weight.format, bias=bias)
            assert found is out
            assert_near(out, expected + bias.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32] if HAS_GPU else [torch.float32])
@pytest.mark.parametrize("num_rows", [1, 33, 300])
@pytest.mark.parametrize(("kind", "rows", "columns"), [case for case in CASES if case[0] in ("channel", "block")])
def test_fp8_weights_without_fp8_units(kind: Kind, rows: int, columns: int, num_rows: int, dtype: torch.dtype) -> None:
    weight = make_weight(kind, rows, columns, dtype)
    x = make_rows(num_rows, columns, dtype)
    expected = x.double() @ weight.values.double().T
    assert weight.scales is not None
    for device in {DEVICE, torch.device("cpu")}:
        operands = (one.to(device) for one in (x, weight.numbers, weight.scales))
        assert_near(fp8_weight_linear(*operands, None, None).to(DEVICE), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])])
def test_every_fp8_code_is_its_number(dtype: torch.dtype) -> None:
    """But NaN, which no weight is."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = torch.where(codes.float().isnan(), 0.0, codes.float()).to(codes.dtype).view(16, 16)
    rows, scales = torch.eye(16, dtype=dtype, device=DEVICE), torch.ones(16, device=DEVICE)
    found = multiply(rows, weight.to(DEVICE), LAUNCHES["few rows"], scales=scales)
    assert found.dtype == dtype
    assert torch.equal(found.cpu().float(), weight.float().t())


@pytest.mark.pairwise
@pytest.mark.parametrize("name", ["few rows", "pointers", "tile after tile"])
@pytest.mark.parametrize("gate", ACTIVATE_AND_MUL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "rows", "columns"), [case for case in CASES if case[0] not in ("channel", "block")])
def test_gated_products(kind: Kind, rows: int, columns: int, dtype: torch.dtype, gate: Activation, name: str) -> None:
    weight = make_weight(kind, rows, columns, dtype)
    x = make_rows(40, columns, dtype) / 100
    expected = ACTIVATE_AND_MUL[gate](F.linear(x.float(), weight.values).to(dtype))
    launch = launch_for(LAUNCHES[name], weight)
    found = multiply(x, weight.numbers, launch, scales=weight.scales, format=weight.format, gate=gate)
    assert found.dtype == dtype
    assert_near(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 16, 17, 100, 128] if HAS_GPU else [1, 17, 70])
@pytest.mark.parametrize("shape", [(4096, 1024), (1024, 3072), (64, 256)] if HAS_GPU else [(64, 256), (128, 1024)])
def test_few_rows(shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> None:
    """The launches of weights of 16 bits; their parts add up in the norm."""
    weight, values, *_ = make_weight("plain", *shape, dtype)
    x = make_rows(num_rows, shape[1], dtype) / 100
    expected = x.float() @ values.T
    assert_near(launches.linear(x, weight), expected)
    assert_near(launches.gated_linear(x, weight, "silu"), silu_and_mul(expected.to(dtype)))
    residual, scale = make_rows(num_rows, shape[0], dtype, seed=2), torch.rand(shape[0]).to(DEVICE, dtype)
    total = residual.clone()
    out = norm.add_rms_norm(launches.linear_parts(x, weight), total, scale, 1e-6)
    expected_total = residual.cpu()
    expected_out = norm_reference.add_rms_norm(expected.to(dtype).cpu(), expected_total, scale.cpu(), 1e-6)
    assert_near(total.cpu(), expected_total)
    assert_near(out.cpu(), expected_out)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [100, 2047, 2048, 4099, 8191])
@pytest.mark.parametrize("shape", [(6144, 1024), (24576, 4096), (2 * 1216, 896), (256, 96)])
def test_any_number_of_rows_agrees_with_two_steps(shape: tuple[int, int], num_rows: int) -> None:
    """Whichever kernel the number of rows chooses, the result is that of a product and an activation. A rank's shard
    may have any number of rows: Qwen2.5-0.5B's has 1216 of each projection on four ranks."""
    weight, *_ = make_weight("plain", *shape, torch.bfloat16)
    x = make_rows(num_rows, shape[1], torch.bfloat16) / 100
    assert_near(linear.gated_linear(x, weight), silu_and_mul(F.linear(x, weight)))


@pytest.mark.gpu
def test_a_graph_follows_its_inputs_and_nothing_compiles_anew() -> None:
    """Neither another number of rows nor another shape does."""
    weight, *_ = make_weight("plain", 6144, 1024, torch.bfloat16)
    x = make_rows(2048, 1024, torch.bfloat16)
    launch = LAUNCHES["many rows"]

    def run(rows: torch.Tensor) -> torch.Tensor:
        return multiply(rows, weight, launch, gate="silu")

    graph, out = captured(lambda: run(x))
    compiled = products.product_kernel.device_caches[torch.cuda.current_device()][0]
    before = len(compiled)
    for num_rows in (2048, 2000, 1024, 17, 1):
        x.normal_()
        graph.replay()
        assert torch.equal(out[:num_rows], run(x[:num_rows]))
    multiply(x[:, :512].contiguous(), weight[:1024, :512].contiguous(), launch, gate="silu")
    assert len(compiled) == before
