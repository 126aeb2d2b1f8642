"""Experts: the sorted pairs and the products in Triton against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.kernels import experts as reference
from nvcli.kernels.expert_settings import GatedActivation
from nvcli.kernels.expert_types import ExpertWeights, Routes
from nvcli.kernels.norm import add_rms_norm
from nvcli.kernels.triton import norm
from nvcli.kernels.triton.expert_groups import group_by_expert
from nvcli.kernels.triton.experts import ExpertLaunch, Launch, apply_experts

DTYPES = [torch.bfloat16, torch.float16, torch.float32] if HAS_GPU else [torch.float32]
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SILU = GatedActivation()
ACTIVATIONS = [SILU, GatedActivation(kind="gelu_tanh"), GatedActivation(kind="clamped_swiglu", alpha=1.702, limit=1.0)]

pytestmark = MARKS


def apply_on_device(
    x: torch.Tensor,
    routes: Routes,
    weights: ExpertWeights,
    activation: GatedActivation,
    launch: ExpertLaunch | None = None,
) -> torch.Tensor:
    """The Triton kernels' result, in memory that holds NaN before."""
    out = x.new_full((routes.experts.shape[1], *x.shape), torch.nan)
    apply_experts(x, routes, weights, activation, out, launch)
    return out


def routes_of(num_tokens: int, num_experts: int, experts_per_token: int, *, favourite: int | None = None) -> Routes:
    """Distinct random experts for each token; with `favourite`, that one for all tokens."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if favourite is not None:
        scores[:, favourite] = 2
    weights, experts = scores.topk(experts_per_token)
    return Routes(experts.int(), weights)


def weights_of(
    num_experts: int, hidden: int, intermediate: int, dtype: torch.dtype, *, biases: bool = False
) -> ExpertWeights:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return ExpertWeights(
        gate_up=(random(num_experts, 2 * intermediate, hidden) * hidden**-0.5).to(dtype),
        down=(random(num_experts, hidden, intermediate) * intermediate**-0.5).to(dtype),
        gate_up_bias=random(num_experts, 2 * intermediate).to(dtype) if biases else None,
        down_bias=random(num_experts, hidden).to(dtype) if biases else None,
    )


def on_device(tensors):
    return type(tensors)(*(value.to(DEVICE) if isinstance(value, torch.Tensor) else value for value in tensors))


def in_float32(weights: ExpertWeights) -> ExpertWeights:
    return ExpertWeights(*(value.float() if isinstance(value, torch.Tensor) else value for value in weights))


def share_of(weights: ExpertWeights, first: int, end: int) -> ExpertWeights:
    """What a rank that holds some of the experts has."""
    tensors = (None if tensor is None else tensor[first:end].contiguous() for tensor in weights[:4])
    return ExpertWeights(*tensors, first_expert=first, num_others=len(weights.gate_up) - (end - first))


class TestReference:
    def test_every_expert_is_a_gated_mlp_of_its_tokens(self) -> None:
        """Computed in the plainest way: all experts for all tokens, and the chosen ones taken."""
        routes, weights = routes_of(6, 5, 2), weights_of(5, 16, 8, torch.float32)
        x = torch.randn(6, 16)
        gate, up = torch.einsum("th,eih->tei", x, weights.gate_up).chunk(2, dim=-1)
        everyone = torch.einsum("tei,ehi->teh", F.silu(gate) * up, weights.down)
        expected = everyone[torch.arange(6)[:, None], routes.experts.long()] * routes.weights[..., None]
        actual = reference.apply_experts(x, routes, weights, SILU)
        torch.testing.assert_close(actual, expected.transpose(0, 1))

    def test_each_pair_is_computed_where_its_expert_is(self) -> None:
        """The results of ranks that hold some experts each are those of one that holds all, and zeros elsewhere."""
        routes, weights = routes_of(9, 6, 3), weights_of(6, 16, 8, torch.float32, biases=True)
        x = torch.randn(9, 16)
        whole, total = reference.apply_experts(x, routes, weights, SILU), torch.zeros(3, 9, 16)
        for first, end in ((0, 2), (2, 3), (3, 6)):
            part = reference.apply_experts(x, routes, share_of(weights, first, end), SILU)
            is_mine = ((routes.experts >= first) & (routes.experts < end)).t()
            assert torch.equal(part[is_mine], whole[is_mine])
            assert (part[~is_mine] == 0).all()
            total += part
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
        order, items, _ = group_by_expert(routes.experts.to(DEVICE), num_experts, row_tile)
        expected = reference.group_by_expert(routes.experts, num_experts)
        assert torch.equal(order.cpu(), expected.order)
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
        [(1, 16, 4, 16), (7, 60, 4, 16), (40, 12, 4, 16)],
    )
    def test_a_rank_with_some_experts_has_items_of_them_alone(
        self, num_tokens: int, num_experts: int, experts_per_token: int, row_tile: int
    ) -> None:
        routes = routes_of(num_tokens, num_experts, experts_per_token, favourite=num_experts - 1)
        flat, seen = routes.experts.flatten(), []
        held = num_experts // 4
        for first_expert in range(0, num_experts, held):
            order, items, _ = group_by_expert(
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


# Tokens, experts, experts per token, hidden, intermediate: Qwen3-MoE's kind, sizes that no tile divides, one expert.
CASES = (
    [
        (1, 128, 8, 2048, 768),
        (64, 128, 8, 2048, 768),
        (300, 32, 4, 2880, 1440),
        (2500, 128, 8, 2048, 384),
        (33, 1, 1, 64, 40),
    ]
    if HAS_GPU
    else [(1, 16, 4, 64, 32), (20, 6, 3, 72, 40), (33, 1, 1, 64, 40)]
)
LAUNCHES = {
    "measured": None,
    "few rows": ExpertLaunch(16, Launch(32, 32, 3, 4), Launch(64, 64, 3, 4)),
    "more rows": ExpertLaunch(32, Launch(64, 64, 3, 4), Launch(64, 32, 3, 4)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("case", CASES)
def test_apply_experts(case: tuple[int, ...], launch: str, dtype: torch.dtype) -> None:
    num_tokens, num_experts, experts_per_token, hidden, intermediate = case
    routes = routes_of(num_tokens, num_experts, experts_per_token)
    weights = weights_of(num_experts, hidden, intermediate, dtype)
    x = torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = reference.apply_experts(x.float(), routes, in_float32(weights), SILU)
    actual = apply_on_device(x.to(DEVICE), on_device(routes), on_device(weights), SILU, LAUNCHES[launch])
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float().cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in CASES if case[1] > 1])
def test_shares_of_the_experts(case: tuple[int, ...], dtype: torch.dtype) -> None:
    num_tokens, num_experts, experts_per_token, hidden, intermediate = case
    routes = routes_of(num_tokens, num_experts, experts_per_token)
    weights = weights_of(num_experts, hidden, intermediate, dtype, biases=True)
    x = torch.randn(num_tokens, hidden, generator=torch.Generator().manual_seed(2)).to(dtype)
    for first in range(0, num_experts, num_experts // 2):
        share = share_of(weights, first, first + num_experts // 2)
        expected = reference.apply_experts(x.float(), routes, in_float32(share), SILU)
        actual = apply_on_device(x.to(DEVICE), on_device(routes), on_device(share), SILU)
        torch.testing.assert_close(actual.float().cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.kind)
def test_biases_and_activations(activation: GatedActivation) -> None:
    dtype = DTYPES[0]
    routes, weights = routes_of(40, 4, 2), weights_of(4, 64, 32, dtype, biases=True)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = reference.apply_experts(x.float(), routes, in_float32(weights), activation)
    for launch in ("few rows", "more rows"):
        actual = apply_on_device(x.to(DEVICE), on_device(routes), on_device(weights), activation, LAUNCHES[launch])
        torch.testing.assert_close(actual.float().cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_broken_token_breaks_no_other() -> None:
    """A row of NaN shares tiles with other tokens' rows; their results stay what they are without it, bit by bit."""
    dtype = DTYPES[0]
    routes, weights = on_device(routes_of(20, 6, 3)), on_device(weights_of(6, 64, 32, dtype))
    x = torch.randn(20, 64).to(DEVICE, dtype)
    expected = apply_on_device(x, routes, weights, SILU)
    x[7] = torch.nan
    actual = apply_on_device(x, routes, weights, SILU)
    assert actual[:, 7].isnan().all()
    others = torch.arange(20) != 7
    assert torch.equal(actual[:, others], expected[:, others])


def test_the_norm_sums_over_the_experts_of_a_token() -> None:
    """The residual sum takes the result of `apply_experts` as it is."""
    dtype = DTYPES[0]
    parts, residual = torch.randn(8, 5, 96).to(dtype), torch.randn(5, 96).to(dtype)
    weight, here = torch.randn(96).to(dtype), residual.to(DEVICE, copy=True)
    out = norm.add_rms_norm(parts.to(DEVICE), here, weight.to(DEVICE), 1e-6)
    expected = add_rms_norm(parts, residual, weight, 1e-6)
    torch.testing.assert_close(here.cpu(), residual, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(out.cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
