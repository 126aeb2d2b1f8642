"""Routers: the reference against what the families' papers say, and the Triton kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.kernels import routing as reference
from nvcli.kernels.expert_settings import Routing
from nvcli.kernels.triton.products import routing

ROUTINGS = {
    "qwen3": Routing(num_experts=128, experts_per_token=8, renormalise=True),
    "olmoe": Routing(num_experts=64, experts_per_token=8),
    "mixtral": Routing(num_experts=8, experts_per_token=2, renormalise=True),
    "qwen2": Routing(num_experts=60, experts_per_token=4),
    "glm": Routing(num_experts=160, experts_per_token=8, scoring="sigmoid", renormalise=True, scale=2.5),
    "deepseek": Routing(
        num_experts=48,
        experts_per_token=6,
        scoring="sigmoid",
        renormalise=True,
        scale=2.5,
        num_groups=4,
        groups_per_token=2,
    ),
    "deepseek-v2": Routing(
        num_experts=12, experts_per_token=3, scale=1.5, num_groups=4, groups_per_token=2, sums_two_best=False
    ),
    "phi-3.5-moe": Routing(num_experts=16, experts_per_token=2, scoring="sparsemixer", tolerance=0.6),
    "deepseek-v4": Routing(num_experts=24, experts_per_token=6, scoring="sqrtsoftplus", renormalise=True, scale=1.5),
    "inkling": Routing(
        num_experts=30, experts_per_token=6, scoring="sigmoid", renormalise=True, scale=8.0, num_shared=3
    ),
    "every expert": Routing(num_experts=5, experts_per_token=5),
}


def logits_of(routing: Routing, num_tokens: int, num_parts: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_parts, num_tokens, routing.num_experts + routing.num_shared, generator=generator) * 2


def correction_of(routing: Routing) -> torch.Tensor | None:
    """The families with scores of single experts have one."""
    if routing.scoring not in ("sigmoid", "sqrtsoftplus"):
        return None
    return torch.randn(routing.num_experts, generator=torch.Generator().manual_seed(1)) * 0.3


class TestReference:
    def test_softmax_over_the_chosen_is_the_renormalised_softmax(self) -> None:
        """Mixtral and gpt-oss choose first; the contract of `Routing` says that it is the same."""
        routing = ROUTINGS["mixtral"]
        logits = logits_of(routing, 20)
        best = logits[0].topk(2)
        routes = reference.route(logits, routing)
        torch.testing.assert_close(routes.experts.long(), best.indices)
        torch.testing.assert_close(routes.weights, best.values.softmax(-1))

    def test_a_correction_chooses_and_does_not_weigh(self) -> None:
        routing = Routing(num_experts=4, experts_per_token=2, scoring="sigmoid")
        routes = reference.route(
            torch.tensor([[[3.0, 2.0, 1.0, 0.0]]]), routing, correction=torch.tensor([0.0, 0.0, 0.0, 9.0])
        )
        assert routes.experts.tolist() == [[3, 0]]
        torch.testing.assert_close(routes.weights, torch.tensor([[0.0, 3.0]]).sigmoid())

    def test_shared_experts_are_weighed_with_those_that_are_chosen(self) -> None:
        routing = ROUTINGS["inkling"]
        logits = logits_of(routing, 20)
        routes = reference.route(logits, routing, correction=correction_of(routing))
        assert routes.shared is not None
        logs = torch.cat((logits[0].gather(1, routes.experts.long()), logits[0, :, -3:]), dim=1).sigmoid().log()
        torch.testing.assert_close(torch.cat((routes.weights, routes.shared), dim=1), 8 * logs.softmax(1))

    def test_a_correction_of_logits_chooses_among_scores_that_are_all_one(self) -> None:
        routing = Routing(
            num_experts=4, experts_per_token=2, scoring="sigmoid", corrects_logits=True, renormalise=True, scale=3.0
        )
        logits = torch.tensor([[[60.0, 50.0, 40.0, 0.0], [0.0, -1.0, -2.0, -8.0]]])
        correction = torch.tensor([0.0, 0.0, 11.0, 0.0])
        routes = reference.choose_experts(logits, routing, correction=correction)
        assert routes.experts.tolist() == [[0, 2], [2, 0]]
        scores = torch.tensor([-2.0, 0.0]).sigmoid()
        expected = torch.stack([torch.tensor([1.5, 1.5]), 3 * scores / scores.sum()])
        torch.testing.assert_close(routes.weights, expected)

    def test_groups_are_chosen_by_their_two_best_experts(self) -> None:
        """The best expert of all is in a group whose second is poor, and is passed over."""
        routing = Routing(num_experts=6, experts_per_token=2, scoring="sigmoid", num_groups=2, groups_per_token=1)
        routes = reference.route(torch.tensor([[[5.0, -5.0, -5.0, 2.0, 3.0, 2.5]]]), routing)
        assert routes.experts.tolist() == [[4, 5]]


def test_factors_weigh_and_do_not_choose() -> None:
    spec = ROUTINGS["qwen3"]
    logits, factors = logits_of(spec, 9), torch.linspace(-1.0, 2.0, spec.num_experts)
    plain, expected = reference.route(logits, spec), reference.route(logits, spec, factors=factors)
    assert torch.equal(expected.experts, plain.experts)
    torch.testing.assert_close(expected.weights, plain.weights * factors[plain.experts.long()])
    actual = routing.route(logits.to(DEVICE), spec, factors=factors.to(DEVICE))
    assert torch.equal(actual.experts.cpu(), expected.experts)
    torch.testing.assert_close(actual.weights.cpu(), expected.weights, atol=1e-5, rtol=1e-4)


def test_experts_that_are_given_are_weighed() -> None:
    """Also those of low scores, down to where a softplus is a small exponential."""
    spec = ROUTINGS["deepseek-v4"]
    logits = logits_of(spec, 9, 2) - 4
    chosen = torch.stack([torch.randperm(spec.num_experts)[: spec.experts_per_token] for _ in range(9)]).int()
    scores = torch.log1p(logits.sum(0).double().exp()).sqrt().gather(1, chosen.long())
    expected = scores / scores.sum(1, keepdim=True) * spec.scale
    given = reference.route(logits, spec, chosen=chosen)
    row_by_row = reference.route_row_by_row(logits, spec, chosen=chosen)
    by_kernel = routing.route(logits.to(DEVICE), spec, chosen=chosen.to(DEVICE))
    for routes in (given, row_by_row, by_kernel):
        assert torch.equal(routes.experts.cpu(), chosen)
        torch.testing.assert_close(routes.weights.cpu().double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("num_parts", [1, 4])
@pytest.mark.parametrize("name", ROUTINGS)
def test_route(name: str, num_parts: int) -> None:
    spec = ROUTINGS[name]
    logits, correction = logits_of(spec, 1000 if HAS_GPU else 9, num_parts), correction_of(spec)
    bias = torch.linspace(-1, 1, spec.num_experts) if name == "mixtral" else None
    expected = reference.route(logits, spec, bias=bias, correction=correction)
    actual = routing.route(
        logits.to(DEVICE),
        spec,
        bias=None if bias is None else bias.to(DEVICE),
        correction=None if correction is None else correction.to(DEVICE),
    )
    assert actual.experts.dtype == torch.int32
    assert torch.equal(actual.experts.cpu(), expected.experts)
    torch.testing.assert_close(actual.weights.cpu(), expected.weights, atol=1e-5, rtol=1e-4)
    if expected.shared is not None:
        assert actual.shared is not None
        torch.testing.assert_close(actual.shared.cpu(), expected.shared, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "deepseek", "phi-3.5-moe"])
def test_equal_and_broken_scores_give_distinct_experts(name: str) -> None:
    """An expert that a token had twice would break the work list, for the other rows of the step too."""
    spec = ROUTINGS[name]
    logits = torch.stack(
        [
            torch.zeros(spec.num_experts),
            torch.full((spec.num_experts,), torch.nan),
            torch.full((spec.num_experts,), -torch.inf),
            torch.full((spec.num_experts,), torch.inf),
            torch.where(torch.arange(spec.num_experts) % 7 == 0, 1.0, torch.nan),
        ]
    )[None]
    routes = routing.route(logits.to(DEVICE), spec, bias=None, correction=None)
    for experts in routes.experts.tolist():
        assert len(set(experts)) == spec.experts_per_token
        assert all(0 <= expert < spec.num_experts for expert in experts)
    assert torch.equal(routes.experts.cpu()[[0, 2]], reference.route(logits[:, [0, 2]], spec).experts)
    assert routes.weights[1].isnan().all()


pytestmark = MARKS
