"""FP8 kernels against plain torch: interpreted in float32, and on a GPU with FP8 units at real sizes."""

from __future__ import annotations

import pytest
import torch

from fp8_interpreter import exact_conversions
from kernel_device import DEVICE, DTYPES, HAS_GPU, MARKS, captured
from nvcli.kernels import fp8 as reference
from nvcli.kernels.activation import ACTIVATE_AND_MUL, Activation
from nvcli.kernels.fp8 import quantise_weight
from nvcli.kernels.fp8_types import FP8, QuantisedRows
from nvcli.kernels.triton.elementwise import fp8, fp8_weights, norm
from nvcli.kernels.triton.products.fp8_linear import fp8_linear
from nvcli.kernels.triton.products.launch_rule import Kind, choose
from nvcli.kernels.triton.products.product_launch import ProductLaunch
from nvcli.kernels.weight_formats import FP8Scaling

HAS_UNITS = HAS_GPU and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [*MARKS, pytest.mark.skipif(HAS_GPU and not HAS_UNITS, reason="needs a GPU with FP8 units")]
__all__ = ["exact_conversions"]

SCALINGS = pytest.mark.parametrize("scaling", ["channel", "block"])
KINDS: list[Kind] = ["channel", "sum", "block"]
SIZES = [16, 96, 128, 1000, 1024, 4096, 12288] if HAS_GPU else [16, 200, 1280]


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """On the CPU, where the reference is computed; rows of very different sizes."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (values * torch.logspace(-2, 2, shape[-2]).unsqueeze(1)).to(dtype)


def assert_same(found: QuantisedRows, expected: QuantisedRows) -> None:
    """Equal codes but for a few neighbours: a division may be rounded differently."""
    assert found.codes.shape == expected.codes.shape
    assert found.codes.dtype == expected.codes.dtype
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.scales.cpu(), expected.scales, rtol=3e-2 if HAS_GPU else 1e-5, atol=1e-9)
    one, other = found.codes.cpu().float(), expected.codes.float()
    assert ((one - other).abs() <= 0.13 * other.abs() + 2.0**-8).all()
    assert (one != other).sum() <= max(2, (0.02 if HAS_GPU else 1e-3) * one.numel())
    assert (found.values is None) == (expected.values is None)
    if found.values is not None:
        torch.testing.assert_close(found.values.cpu(), expected.values, atol=1e-6, rtol=1.6e-2)


@SCALINGS
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantise(size: int, dtype: torch.dtype, scaling: FP8Scaling) -> None:
    x = rand(3, size, dtype=dtype)
    assert_same(fp8.quantise(x.to(DEVICE), scaling), reference.quantise(x, scaling))
    wide = rand(3, size + 32, dtype=dtype)
    found = fp8.quantise(wide.to(DEVICE)[:, 16 : size + 16], scaling)
    assert_same(found, reference.quantise(wide[:, 16 : size + 16], scaling))


@pytest.mark.parametrize("size", SIZES)
def test_rows_that_share_a_program(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_MANY_ROWS", 1)
    x = rand(7, size, dtype=DTYPES[0])
    assert_same(fp8.quantise(x.to(DEVICE), "channel"), reference.quantise(x, "channel"))


@pytest.mark.parametrize("size", SIZES)
def test_rows_at_the_places_of_pairs(size: int) -> None:
    """What no pair has is left as it is."""
    x, order = rand(11, size, dtype=DTYPES[0]), torch.randperm(22, generator=torch.Generator().manual_seed(0))
    is_used = torch.arange(22) % 4 != 1
    places = order.argsort().int()
    places[order[~is_used]] = -1
    codes = torch.zeros(22, size, dtype=torch.uint8, device=DEVICE).view(FP8)
    found = fp8.quantise_pairs(x.to(DEVICE), places.to(DEVICE), codes)
    used = QuantisedRows(codes.cpu().view(torch.uint8)[is_used].view(FP8), found.scales.cpu()[is_used], found.dtype)
    assert_same(used, reference.quantise(x[order[is_used] // 2], "channel"))
    assert not codes.cpu().view(torch.uint8)[~is_used].any()


@pytest.mark.parametrize("shares_programs", [False, True])
@pytest.mark.parametrize("num_groups", [1, 3, 40, 96])
def test_groups_get_one_scale(num_groups: int, shares_programs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Powers of two change nothing but what gets too small for FP8, which is rounded."""
    if shares_programs:
        monkeypatch.setattr(fp8, "_MANY_ROWS", 1)
    generator = torch.Generator().manual_seed(0)
    codes = (torch.randn(5, num_groups, 128, generator=generator) * 100).clamp_(-448, 448).to(FP8)
    exponents = torch.randint(100, 120, (5, num_groups), generator=generator, dtype=torch.uint8)
    exponents[1] = 110
    exponents[2, 0] = 2  # which is smaller by more than float32 can say
    values = codes.float() * 2.0 ** (exponents.float() - 127).unsqueeze(-1)
    shared = codes.flatten(1).to(DEVICE).clone()
    scales = fp8.share_scales(shared, exponents.to(DEVICE)).cpu()
    assert torch.equal(scales, 2.0 ** (exponents.amax(1).float() - 127))
    expected = (values.flatten(1) / scales.unsqueeze(1)).to(FP8)
    assert torch.equal(shared.cpu().float(), expected.float())
    if num_groups > 1:
        assert torch.equal(shared[1].cpu().float(), codes[1].flatten().float())


@SCALINGS
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activate_and_quantise(activation: Activation, dtype: torch.dtype, scaling: FP8Scaling) -> None:
    for size in SIZES[1:]:
        gate_up = rand(3, 2 * size, dtype=dtype) / 100  # exp of the largest gate is finite
        found = fp8.activate_and_quantise(gate_up.to(DEVICE), activation, scaling)
        activated = ACTIVATE_AND_MUL[activation](gate_up.float()).to(dtype)  # rounded once, as the kernel does it
        assert_same(found, reference.quantise(activated, scaling))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
@SCALINGS
def test_gates_of_any_size(scaling: FP8Scaling) -> None:
    """Exponentials beyond what float32 holds leave nothing of a gate, or all of it."""
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    gates = torch.tensor([-3e4, -200.0, -88.0, -30.0, -1.0, 0.0, 1.0, 30.0, 88.0, 200.0, 448.0], dtype=dtype)
    gate_up = torch.cat([gates, torch.ones(len(gates), dtype=dtype)]).unsqueeze(0)
    found = fp8.activate_and_quantise(gate_up.to(DEVICE), "silu", scaling)
    assert_same(found, reference.quantise(ACTIVATE_AND_MUL["silu"](gate_up.float()).to(dtype), scaling))


@SCALINGS
@pytest.mark.parametrize("delta", ["none", "one", "parts"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_quantise(delta: str, dtype: torch.dtype, scaling: FP8Scaling) -> None:
    for size in SIZES[1:]:
        residual, weight = rand(4, size, dtype=dtype), torch.rand(size).to(dtype)
        change = {
            "none": None,
            "one": rand(4, size, dtype=dtype, seed=1),
            "parts": rand(3, 4, size, seed=1),
        }[delta]
        on_device, moved = residual.to(DEVICE, copy=True), None if change is None else change.to(DEVICE)
        centred = size == SIZES[1]
        ways = {"is_centered": centred, "keeps_values": size == SIZES[-1]}
        found = norm.norm_and_quantise(moved, on_device, weight.to(DEVICE), 1e-6, scaling, **ways)
        expected = reference.norm_and_quantise(change, residual, weight, 1e-6, scaling, **ways)
        torch.testing.assert_close(on_device.cpu(), residual, atol=1e-6, rtol=1.6e-2)
        assert_same(found, expected)


@SCALINGS
def test_zeros_and_what_is_not_finite(scaling: FP8Scaling) -> None:
    x = torch.ones(4, 256)
    x[0] = 0
    x[1, 3], x[2, 200] = torch.nan, torch.inf
    found, expected = fp8.quantise(x.to(DEVICE), scaling), reference.quantise(x, scaling)
    codes = found.codes.cpu().float()
    assert (codes[0] == 0).all()
    assert codes[1, 3].isnan()
    assert codes[2, 200].isnan()
    assert found.scales[2].isinf().any()
    assert torch.equal(codes[3], expected.codes[3].float())


def make_product(
    num_rows: int, shape: tuple[int, int], scaling: FP8Scaling
) -> tuple[QuantisedRows, tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Rows and a weight with its scales on the device, and their product by the reference on the CPU."""
    x = rand(num_rows, shape[1], dtype=torch.bfloat16 if HAS_GPU else torch.float32)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * shape[1] ** -0.5
    codes, scales = quantise_weight(weight, scaling)
    rows = reference.quantise(x, scaling)
    expected = reference.fp8_linear(rows, codes, scales, None, None)
    on_device = QuantisedRows(rows.codes.to(DEVICE), rows.scales.to(DEVICE), rows.dtype)
    return on_device, (codes.to(DEVICE), scales.to(DEVICE)), expected


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Each row is near the expected one."""
    tolerance = 2e-2 if HAS_GPU else 1e-4
    norm = expected.float().norm(dim=1, keepdim=True)
    assert ((found.cpu().float() - expected.float()).norm(dim=1, keepdim=True) <= tolerance * norm).all()


@pytest.mark.pairwise
@pytest.mark.parametrize("num_rows", [1, 33, 100] if not HAS_GPU else [1, 7, 64, 65, 256, 1000])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 12288), (1024, 3072)] if HAS_GPU else [(256, 128), (80, 400)])
def test_products(shape: tuple[int, int], kind: Kind, num_rows: int) -> None:
    x, weight, expected = make_product(num_rows, shape, "block" if kind == "block" else "channel")
    if HAS_GPU and kind == "sum":
        found = reference.fp8_linear_for_sum(x, *weight)
    elif HAS_GPU:
        found = reference.fp8_linear(x, *weight, None, None)
    else:
        launch = choose(kind, x, weight[0])
        assert isinstance(launch, ProductLaunch), "the others have no interpreter"
        found = fp8_linear(x, *weight, launch)
    found = found.sum(0).to(expected.dtype) if found.dim() == 3 else found
    assert found.dtype == expected.dtype
    assert_near(found, expected)


@pytest.mark.gpu
@SCALINGS
@pytest.mark.parametrize("num_rows", [0, 1, 17, 64, 65, 256, 3000])
def test_products_on_fp8_units(num_rows: int, scaling: FP8Scaling) -> None:
    """Whatever multiplies, it gives what plain torch gives, with a bias and into memory that is there."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(num_rows, 4096, generator=generator, device=DEVICE).bfloat16()
    weight, bias = torch.randn(6144, 4096, generator=generator, device=DEVICE) / 64, torch.rand(6144, device=DEVICE)
    codes, scales = quantise_weight(weight, scaling)
    rows = reference.quantise(x, scaling)
    found = reference.fp8_linear(rows, codes, scales, bias.bfloat16(), None).float()
    on_cpu = QuantisedRows(rows.codes.cpu(), rows.scales.cpu(), torch.float32)
    expected = reference.fp8_linear(on_cpu, codes.cpu(), scales.cpu(), bias.cpu(), None).to(DEVICE)
    torch.testing.assert_close(found, expected, atol=3e-2, rtol=2e-2)
    out = torch.empty(num_rows, 6144, dtype=torch.bfloat16, device=DEVICE)
    assert reference.fp8_linear(rows, codes, scales, None, out) is out
    torch.testing.assert_close(out.float(), expected - bias, atol=3e-2, rtol=2e-2)


@pytest.mark.gpu
@SCALINGS
def test_a_graph_follows_its_inputs(scaling: FP8Scaling) -> None:
    x = torch.randn(48, 1024, device=DEVICE, dtype=torch.bfloat16)
    codes, scales = quantise_weight(torch.randn(512, 1024, device=DEVICE) / 32, scaling)

    def run() -> torch.Tensor:
        return reference.fp8_linear(reference.quantise(x, scaling), codes, scales, None, None)

    graph, out = captured(run)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, run())


@pytest.mark.parametrize("has_product", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_weights_are_quantised_bit_for_bit(size: int, has_product: bool) -> None:
    """As the reference does on the same device, rows of zeros and of NaN too; half a product added in float32."""
    values = rand(9, size, seed=1).to(DEVICE, torch.bfloat16 if has_product else torch.float32)
    product = rand(9, size, seed=2).to(DEVICE) if has_product else None
    values[2], values[4, 3] = 0, float("nan")
    if product is not None:
        product[2] = 0
    codes = torch.empty(9, size, dtype=FP8, device=DEVICE)
    scales = torch.empty(9, device=DEVICE)
    fp8_weights.quantise_rows(values, codes, scales, product, 0.5)
    total = values.float() if product is None else values.float() + 0.5 * product
    expected_codes, expected_scales = quantise_weight(total, "channel")
    assert torch.equal(scales.nan_to_num(-1), expected_scales.nan_to_num(-1))
    assert torch.equal(codes.float().nan_to_num(-1), expected_codes.float().nan_to_num(-1))
