"""Experts: the sorted pairs, plain torch against plain numbers, and the products in Triton against plain torch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from expert_cases import (
    CLAMPED_SILU,
    FORMATS,
    GPT_OSS,
    SILU,
    Case,
    Shape,
    error,
    first_of,
    make,
    of_held,
    routes_of,
    share_of,
)
from torch import Tensor

from combinations import full
from fp8_interpreter import exact_conversions
from kernel_device import DEVICE, HAS_GPU, MARKS, TOLERANCE
from nvcli.kernels import experts as reference
from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.expert_types import ExpertScales, W4Scales
from nvcli.kernels.fp8 import quantise
from nvcli.kernels.norm import add_rms_norm
from nvcli.kernels.triton.elementwise import norm, results
from nvcli.kernels.triton.products.expert_groups import group_by_expert
from nvcli.kernels.triton.products.expert_launches import ExpertLaunch
from nvcli.kernels.triton.products.experts import apply_experts
from nvcli.kernels.triton.products.product_launch import ExpertTiles
from nvcli.kernels.weight_formats import FP8_BLOCK, FP8Scaling, W4Format
from nvcli.kernels.whole_numbers import ceil_div

pytestmark = MARKS
HAS_UNITS = not HAS_GPU or torch.cuda.get_device_capability() >= (8, 9)
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
SMALL = (4, 2, 256, 128)
# Qwen3-MoE's kind, and sizes that no tile divides.
SHAPES: list[Shape] = [(128, 8, 2048, 768), (8, 2, 1008, 384)] if HAS_GPU else [SMALL, (3, 1, 144, 128)]
NUM_TOKENS = [1, 16, 300, 3000] if HAS_GPU else [1, 20]
CLAMPED = ExpertActivation(kind="clamped_swiglu", alpha=1.702, limit=1.0, offset=0.5)
ACTIVATIONS = [SILU, ExpertActivation(kind="gelu_tanh"), CLAMPED, CLAMPED_SILU]
KINDS = pytest.mark.parametrize("kind", FORMATS)

__all__ = ["exact_conversions"]


def expected_of(case: Case, activation: ExpertActivation, scaling: FP8Scaling | None = None) -> Tensor:
    """Compute experts in float32 from the numbers that the weights stand for. With `scaling`, activations are rounded
    to FP8 where experts in FP8 round them."""

    def rounded(x: Tensor) -> Tensor:
        if scaling is None:
            return x.float()
        codes, scales, *_ = quantise(x, scaling)
        factors = scales[:, None] if scaling == "channel" else scales.repeat_interleave(FP8_BLOCK, 1)[:, : x.shape[1]]
        return codes.float() * factors

    values, routes = case.values, case.routes
    out = torch.zeros(routes.experts.shape[1], *case.x.shape, device=case.x.device)
    for expert, token, choice in reference.pairs_of_experts(routes, values):
        biases = [None if bias is None else bias[expert] for bias in (values.gate_up_bias, values.down_bias)]
        gate_up = F.linear(rounded(case.x[token]), values.gate_up[expert], biases[0])
        hidden = reference.activate(gate_up, activation).to(case.x.dtype)
        down = F.linear(rounded(hidden), values.down[expert], biases[1])
        out[choice, token] = down * routes.weights[token, choice, None]
    return out


def apply_on_device(
    case: Case, activation: ExpertActivation, launch: ExpertLaunch | None = None, *, quantises: bool = False
) -> Tensor:
    """Return the Triton kernels' result, in memory that holds NaN before."""
    out = case.x.new_full((case.routes.experts.shape[1], *case.x.shape), torch.nan)
    apply_experts(*case[:2], case.weights, case.scales, activation, out, launch, quantises=quantises)
    return of_held(case, out)


class TestReference:
    def test_every_expert_is_a_gated_mlp_of_its_tokens(self) -> None:
        """Computed in the plainest way: all experts for all tokens, and the chosen ones taken."""
        x, routes, weights, _, _ = make(None, (5, 2, 16, 8), 6)
        gate, up = torch.einsum("th,eih->tei", x, weights.gate_up).chunk(2, dim=-1)
        everyone = torch.einsum("tei,ehi->teh", F.silu(gate) * up, weights.down)
        expected = everyone[torch.arange(6)[:, None], routes.experts.long()] * routes.weights[..., None]
        actual = reference.apply_experts(x, routes, weights, SILU)
        torch.testing.assert_close(actual, expected.transpose(0, 1))

    @KINDS
    def test_weights_stand_for_numbers(self, kind: str) -> None:
        case = make(FORMATS[kind], SMALL, 20, biases=True)
        apply = partial(reference.apply_experts, *case[:3], GPT_OSS, scales=case.scales)
        assert error(apply(quantises=False), expected_of(case, GPT_OSS)) < 1e-5
        if isinstance(case.scales, ExpertScales):
            assert 0.005 < error(apply(), expected_of(case, GPT_OSS)) < 0.06, "as near as eight bits allow"

    @KINDS
    def test_each_pair_is_computed_where_its_expert_is(self, kind: str) -> None:
        """The results of ranks that hold some experts each are those of one that holds all."""
        case = make(FORMATS[kind], (6, 3, 256, 128), 9, biases=True)
        whole = reference.apply_experts(*case[:3], SILU, scales=case.scales)
        total = torch.zeros(3, *case.x.shape)
        for first, end in ((0, 2), (2, 3), (3, 6)):
            share = share_of(case, first, end)
            total += of_held(share, reference.apply_experts(*share[:3], SILU, scales=share.scales))
        assert torch.equal(total, whole)


class TestWorkList:
    @pytest.mark.parametrize("favourite", [None, 3])
    @pytest.mark.parametrize(
        ("num_tokens", "num_experts", "experts_per_token", "row_tile"),
        [
            (1, 16, 2, 16),
            (7, 60, 4, 16),
            (64, 4, 1, 32),
            (17, 12, 3, 16),
            (200, 12, 4, 64),
            (700, 8, 8, 128),
        ],
    )
    def test_every_pair_is_in_one_item_of_its_expert(
        self, num_tokens: int, num_experts: int, experts_per_token: int, row_tile: int, favourite: int | None
    ) -> None:
        routes = routes_of(num_tokens, num_experts, experts_per_token, favourite=favourite)
        order, items, _, places = group_by_expert(routes.experts.to(DEVICE), num_experts, row_tile, has_places=True)
        expected = reference.group_by_expert(routes.experts, num_experts)
        assert torch.equal(order.cpu(), expected.order)
        assert places is not None
        assert torch.equal(places.cpu().long(), expected.order.argsort())
        flat = routes.experts.flatten()
        seen = []
        for expert, first, rows, _ in items.tolist():
            assert 0 <= rows <= row_tile
            pairs = order[first : first + rows].cpu()
            assert (flat[pairs] == expert).all()
            seen += pairs.tolist()
        assert sorted(seen) == list(range(num_tokens * experts_per_token))
        full = sum(-(-count // row_tile) for count in expected.counts.tolist())
        assert sum(rows > 0 for _, _, rows, _ in items.tolist()) == full

    @pytest.mark.parametrize(
        ("num_tokens", "num_experts", "experts_per_token", "row_tile"),
        [(1, 16, 4, 16), (7, 60, 4, 16), (40, 12, 4, 16), (200, 12, 4, 64)],
    )
    def test_a_rank_with_some_experts_has_items_of_them_alone(
        self, num_tokens: int, num_experts: int, experts_per_token: int, row_tile: int
    ) -> None:
        routes = routes_of(num_tokens, num_experts, experts_per_token, favourite=num_experts - 1)
        flat, seen = routes.experts.flatten(), []
        held = num_experts // 4
        for first_expert in range(0, num_experts, held):
            order, items, *_ = group_by_expert(
                routes.experts.to(DEVICE),
                held,
                row_tile,
                first_expert=first_expert,
                num_others=num_experts - held,
            )
            for expert, first, rows, _ in items.tolist():
                assert 0 <= rows <= row_tile
                pairs = order[first : first + rows].cpu()
                assert rows == 0 or 0 <= expert < held
                assert (flat[pairs] == first_expert + expert).all()
                seen += pairs.tolist()
        assert sorted(seen) == list(range(num_tokens * experts_per_token))


def is_for_fp8(case: Case) -> bool:
    return isinstance(case.scales, W4Scales) and case.scales.is_for_fp8


def check(case: Case, activation: ExpertActivation = SILU, launch: ExpertLaunch | None = None) -> None:
    """Hold the kernels to plain numbers, if they take these."""
    if is_for_fp8(case):
        return
    found = apply_on_device(case, activation, launch)
    assert found.dtype == case.x.dtype
    assert error(found, expected_of(case, activation)) < (1e-5 if case.x.dtype == torch.float32 else 0.01)


def check_quantised(case: Case, activation: ExpertActivation = SILU, launch: ExpertLaunch | None = None) -> None:
    """Hold the kernels to what the activations that they quantise stand for."""
    if not (isinstance(case.scales, ExpertScales) or is_for_fp8(case)) or not HAS_UNITS:
        return
    by_rows = is_for_fp8(case) or case.weights.down.shape[:2] == case.scales.down.shape
    scaling: FP8Scaling = "channel" if by_rows else "block"
    found = apply_on_device(case, activation, launch, quantises=True)
    # Some hidden activations are rounded to a neighbouring code: 6 % of one of 128 or more.
    assert error(found, expected_of(case, activation, scaling)) < (0.03 if HAS_GPU else 0.01)


@KINDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: Shape, kind: str) -> None:
    format = FORMATS[kind]
    if isinstance(format, W4Format):
        num_experts, chosen, *sizes = shape
        hidden, size = (ceil_div(size, format.group) * format.group for size in sizes)
        shape = (num_experts, chosen, hidden, size)
    for biases, numbers in ((False, NUM_TOKENS[::2]), (True, NUM_TOKENS[1::2])):
        everyone = make(format, shape, max(numbers), DTYPE, DEVICE, biases=biases)
        for num_tokens in numbers:
            case = first_of(everyone, num_tokens)
            check(case)
            check_quantised(case)


@pytest.mark.skipif(not HAS_GPU, reason="the interpreter is right in float32 alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "groups of 32"])
def test_other_types(kind: str, dtype: torch.dtype) -> None:
    for num_tokens in (1, 300):
        check(make(FORMATS[kind], (8, 2, 1024, 384), num_tokens, dtype, DEVICE, biases=True))


@pytest.mark.parametrize(
    ("kind", "rows_first"),
    [
        *(("plain", True), ("channel", False), ("block", True), ("mxfp4", False), ("mxfp4 for fp8", False)),
        *(full(case, in_parts=True) for case in (("plain", False), ("channel", True), ("block", False))),
    ],
)
def test_launches(kind: str, rows_first: bool) -> None:
    """Tiles of all orders, whose last ones are not full, and halves of them."""
    is_w4 = isinstance(FORMATS[kind], W4Format)
    case = make(FORMATS[kind], (5, 2, 288, 160) if is_w4 else (5, 2, 272, 128), 50, DTYPE, DEVICE, biases=True)
    for row_tile in (32, 64):
        launch = ExpertTiles(64, 128, 3, 4, rows_first, has_halves=True)
        launches = ExpertLaunch(row_tile, launch, launch._replace(out_tile=128, has_tiles=not is_w4))
        is_quantised = isinstance(case.scales, ExpertScales) or is_for_fp8(case)
        (check_quantised if is_quantised else check)(case, CLAMPED, launches)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of rows that belong to no pair, in any state
@KINDS
def test_experts_of_other_ranks_are_left_out(kind: str) -> None:
    case = make(FORMATS[kind], (8, 3, 256, 128), 40, DTYPE, DEVICE, biases=True)
    for first, end in ((0, 4), (4, 8)):
        share = share_of(case, first, end)
        check(share, GPT_OSS)
        check_quantised(share, GPT_OSS)


@pytest.mark.parametrize("held", [None, (2, 3)])
def test_sums_of_results(held: tuple[int, int] | None) -> None:
    """Two choices and another part of 1,500 columns; what other ranks hold is NaN."""
    parts = torch.randn(3, 9, 1500, dtype=DTYPE, device=DEVICE)
    experts = torch.randint(0, 7, (9, 2), dtype=torch.int32, device=DEVICE)
    expected = parts.float()
    if held is not None:
        is_held = ((experts - held[0]) // held[1] == 0).T.unsqueeze(2)
        parts[:2] = parts[:2].where(is_held, torch.nan)
        expected[:2] = expected[:2].where(is_held, 0)
    given = (None,) if held is None else (experts, held)
    out = torch.full_like(parts[0], torch.nan)
    for sum_results in (results.sum_results, reference.sum_results):
        found = sum_results(parts, *given, out=out)
        assert found is out
        torch.testing.assert_close(found.float(), expected.sum(0), atol=TOLERANCE[DTYPE], rtol=TOLERANCE[DTYPE])
        assert torch.equal(sum_results(parts, *given), out)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.kind)
def test_biases_and_activations(activation: ExpertActivation) -> None:
    check(make(None, (4, 2, 64, 40), 40, DTYPE, DEVICE, biases=True), activation)


@pytest.mark.parametrize("kind", ["plain", "channel", "block", "groups of 32"])
def test_experts_without_gates(kind: str) -> None:
    case = make(FORMATS[kind], (4, 2, 256, 128), 40, DTYPE, DEVICE, biases=True, is_gated=False)
    for check_one in (check, check_quantised):
        check_one(case, ExpertActivation(kind="relu2"))


def test_a_broken_token_breaks_no_other() -> None:
    """A row of NaN shares tiles with other tokens' rows; their results stay what they are without it, bit by bit."""
    case = make(None, (6, 3, 72, 40), 20, DTYPE, DEVICE)
    expected = apply_on_device(case, SILU)
    case.x[7] = torch.nan
    actual = apply_on_device(case, SILU)
    assert actual[:, 7].isnan().all()
    others = torch.arange(20) != 7
    assert torch.equal(actual[:, others], expected[:, others])


def test_the_norm_sums_over_the_experts_of_a_token() -> None:
    """The residual sum takes the result of `apply_experts` as it is."""
    parts, residual, weight = torch.randn(8, 5, 96).to(DTYPE), torch.randn(5, 96).to(DTYPE), torch.randn(96).to(DTYPE)
    here, tolerance = residual.to(DEVICE, copy=True), 3e-2 if HAS_GPU else 1e-4
    out = norm.add_rms_norm(parts.to(DEVICE), here, weight.to(DEVICE), 1e-6)
    expected = add_rms_norm(parts, residual, weight, 1e-6)
    torch.testing.assert_close(here.cpu(), residual, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(out.cpu(), expected, atol=tolerance, rtol=tolerance)
