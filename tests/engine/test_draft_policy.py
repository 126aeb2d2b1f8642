"""Policies of drafts, simulated: steps whose costs and acceptance are known."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from combinations import full
from fake_runners import engine_config
from nvcli.core.first_drafts import captured_first_from, first_draft_widths
from nvcli.core.messages import StepInput, StepOutput, pack
from nvcli.core.structured import Constraint
from nvcli.engine.draft_costs import DraftCosts, Form, size_of
from nvcli.engine.draft_evidence import DraftEvidence, Outcome
from nvcli.engine.draft_policy import Drafting, DraftPolicy
from nvcli.engine.request import EngineStats, SpeculationFigures
from nvcli.engine.row_widths import RowRates
from nvcli.engine.state import Prompt, RequestState
from nvcli.sizing.graph_sizes import decode_sizes
from requests_factory import make_request

WIDTHS = (2, 3, 4, 6, 8)
UNEVEN: dict[str, Any] = {"uneven_widths": (1.5, 2.0, 3.0, 4.0), "most_of_uneven": 8, "uneven_from": 16}
NEW_SECONDS = 4e-4
"""How much longer the first step of a shape takes."""
HEAD = 2
"""The source of a head's drafts."""


@dataclass(frozen=True)
class Costs:
    """Microseconds of a step on a GPU, fitted to steps on an H200."""

    least: float
    """What every step takes."""
    free_tokens: int
    """Tokens that are multiplied while the weights are read."""
    token: float
    """Another token."""
    row: float
    """The attention of a row."""
    drafts: float
    """What every step with drafts takes besides."""
    row_drafts: float
    """The attention of a row with drafts, besides."""
    experts: float = 0.0
    """Reading all experts, of which each token needs one in 32."""
    extend: float = 0.0
    """What it takes a head to take in a step."""
    head_pass: float = 0.0
    """A pass of a head."""
    capture: float = 0.03
    """Seconds that the device waits while the graph of a shape is captured."""

    def seconds(self, num_rows: int, num_tokens: int) -> float:
        tokens = self.token * max(0, num_tokens - self.free_tokens)
        experts = self.experts * (1 - (31 / 32) ** num_tokens)
        drafts = self.drafts + num_rows * self.row_drafts if num_tokens > num_rows else 0.0
        return 1e-6 * (self.least + tokens + experts + num_rows * self.row + drafts)


MODELS = {
    "0.6B": Costs(950, 0, 2.9, 5, 200, 5.5),
    "8B": Costs(4820, 64, 20, 3.6, 300, 12),
    "8B, fast attention": Costs(4820, 64, 20, 3.6, 100, 1),
    "0.6B, fast attention": Costs(950, 0, 2.9, 5, 150, 0.4),
    "30B-A3B": Costs(6000, 0, 8, 20, 200, 5),
}
WITH_HEADS = {
    "8B, EAGLE-3": Costs(4780, 128, 23, 34, 100, 1, extend=250, head_pass=310, capture=0.055),
    "35B-A3B, MTP": Costs(2580, 128, 15, 41, 100, 5, experts=15300, extend=800, head_pass=750, capture=0.09),
}


class Simulation:
    """The steps of one run, and what looks at its answers show."""

    def __init__(
        self,
        model: str,
        accept_rate: float,
        *,
        seen_rate: float | None = None,
        noise: float = 0.0,
        share: float = 1.0,
        **drafting: Any,
    ) -> None:
        """`seen_rate`: the share of drafts that seems to be right in the answers; None: the same. `share`: of the rows;
        the others have only wrong drafts."""
        seen = accept_rate if seen_rate is None else seen_rate
        self.policy = DraftPolicy(
            Drafting(widths=WIDTHS, max_step_tokens=1024, accept_rate=seen, **{**UNEVEN, **drafting})
        )
        self.costs, self.accept_rate, self.noise, self.share = (MODELS | WITH_HEADS)[model], accept_rate, noise, share
        self.is_extended = True
        """Whether the head took in the last step; with other drafts this does not matter."""
        if seen_rate is None:
            self.policy._evidence = self  # type: ignore[assignment]
        self.has_head = drafting.get("has_head", False)
        self.rng = random.Random(1)
        self.captured: set[tuple[int, int, int]] = set()
        self.rows = [state_of(number, [1, 2], [5]) for number in range(1024)]
        self.num_uneven = 0

    def run(self, num_rows: int, num_steps: int) -> float:
        """Run so many steps; return the gain over steps without drafts."""
        rng, seconds, tokens = self.rng, 0.0, 0.0
        in_flight: list[tuple[StepInput, StepOutput]] = []
        rows = self.rows[:num_rows]
        rates = [self.rate_of(row) for row in range(num_rows)]
        slots, limits = pack(range(num_rows)), pack([1000] * num_rows)
        for number in range(num_steps):
            most = widths = self.policy.widths(rows, 1 << 20, has_prompts=False)
            shared = self.policy.shared_tokens(num_rows) if max(most) > 1 else 0
            if shared:
                widths = surest(rates, max(most), shared)
            right = rates if self.is_extended else [0.0] * num_rows
            counts = [accepted(rng, width, rate) for width, rate in zip(widths, right, strict=True)]
            took = self.costs.seconds(num_rows, sum(widths)) * (1 + rng.uniform(-self.noise, self.noise))
            extends = self.policy.extends(has_drafts=max(widths) > 1, has_prompts=False)
            if self.has_head:
                took += 1e-6 * (extends * self.costs.extend + max(0, max(most) - 2) * self.costs.head_pass)
            drafted = [(width - 1) * self.is_extended for width in widths]
            self.is_extended = extends or not self.has_head
            size = size_of(num_rows)
            shape = size, sum(widths), max(most)
            is_ready = (
                self.has_head and not shared and max(widths) in first_draft_widths(WIDTHS, captured_first_from(size))
            )
            is_new = max(widths) > 1 and shape not in self.captured
            idle = self.costs.capture if is_new and not is_ready else 0.0
            took += NEW_SECONDS if is_new else 0.0
            self.captured.add(shape)
            self.num_uneven += min(widths) < max(widths)
            num_tokens = pack(most)
            step = StepInput(
                step_id=number,
                slots=slots,
                num_tokens=num_tokens,
                num_logits=num_tokens,
                num_decodes=num_rows,
                row_limits=limits if max(most) > 1 else b"",
                draft_tokens=shared,
                extends_drafts=extends,
            )
            output = StepOutput(
                step_id=number,
                token_ids=b"",
                counts=pack(counts),
                drafted=pack(drafted),
                draft_sources=pack([HEAD if self.has_head else 0] * num_rows),
                seconds=took,
                idle_seconds=idle,
            )
            in_flight.append((step, output))
            if len(in_flight) > 1:
                self.policy.learn(*in_flight.pop(0), rows)
            seconds += took + idle
            tokens += sum(counts) / num_rows
        return tokens / seconds * self.costs.seconds(num_rows, num_rows)

    def of(self, state: RequestState) -> Outcome:
        """What a look at a row's answer shows."""
        most = WIDTHS[-1]
        return Outcome(accepted(self.rng, most, self.rate_of(state.request.request_id)) - 1, most - 1)

    def rate_of(self, row: int) -> float:
        """The share of a row's drafts that is right."""
        return self.accept_rate if row % 20 < 20 * self.share else 0.0

    def width(self, num_rows: int, max_tokens: int = 1 << 20, *, has_prompts: bool = False) -> int:
        """The most tokens of a row in the next step."""
        return max(self.policy.widths(self.rows[:num_rows], max_tokens, has_prompts=has_prompts))


def accepted(rng: random.Random, width: int, accept_rate: float) -> int:
    """The tokens that a row of this width gives."""
    count = 1
    while count < width and accept_rate and rng.random() < accept_rate:
        count += 1
    return count


def surest(rates: list[float], most: int, num_tokens: int) -> list[int]:
    """The tokens of each row where drafts go to the rows with the highest rates."""
    widths, left = [1] * len(rates), num_tokens - len(rates)
    for row in sorted(range(len(rates)), key=lambda row: -rates[row]):
        widths[row] += min(left, most - 1)
        left -= widths[row] - 1
    return widths


@pytest.mark.each
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_rows", [1, 16, 256, 1024])
def test_drafts_that_are_always_wrong_cost_less_than_a_hundredth(model: str, num_rows: int) -> None:
    """In a short run and in a long one."""
    simulation = Simulation(model, 0.0, noise=0.05)
    assert simulation.run(num_rows, 100) > 0.99
    assert simulation.run(num_rows, 6_000 if num_rows == 1 else 600) > 0.99


@pytest.mark.parametrize("num_rows", [1, 16, 256])
def test_drafts_that_seemed_right_and_are_wrong_cost_little(num_rows: int) -> None:
    """As where rows have drafts from elsewhere than seen."""
    simulation = Simulation("8B", 0.0, seen_rate=0.9)
    num_steps = 4_000
    plain = num_steps * simulation.costs.seconds(num_rows, num_rows)
    assert simulation.run(num_rows, num_steps) > 1 - (0.5 + 0.01 * plain) / plain


@pytest.mark.parametrize(
    ("model", "num_rows", "least"),
    [
        ("0.6B", 1, 2.1),
        ("8B", 1, 2.6),
        ("8B", 16, 2.2),
        ("0.6B", 256, 1.07),
        ("8B, fast attention", 256, 1.05),
        ("30B-A3B", 64, 1.6),
    ],
)
def test_drafts_that_are_mostly_right_are_made(model: str, num_rows: int, least: float) -> None:
    assert Simulation(model, 0.7, noise=0.02).run(num_rows, 600 if num_rows == 256 else 1_500) > least


@pytest.mark.parametrize(
    ("model", "num_rows", "rate"), [("0.6B", 16, 0.3), full(("0.6B", 128, 0.5), in_parts=True), ("8B", 64, 0.3)]
)
def test_drafts_that_do_not_pay_cost_less_than_a_hundredth(model: str, num_rows: int, rate: float) -> None:
    """In a run of seconds; a try or two cost more of a shorter one."""
    assert Simulation(model, rate, noise=0.02).run(num_rows, 4_000) > 0.99


@pytest.mark.parametrize(
    ("model", "num_rows", "share", "least", "even"),
    [("8B, fast attention", 64, 0.5, 1.6, 1.3), full(("0.6B, fast attention", 128, 0.25, 1.25, 1.01), in_parts=True)],
)
def test_drafts_go_to_the_rows_where_they_are_right(
    model: str, num_rows: int, share: float, least: float, even: float
) -> None:
    """The same number for all rows gains less, or nothing."""
    simulation = Simulation(model, 0.9, share=share, noise=0.02)
    assert simulation.run(num_rows, 800) > least
    assert simulation.num_uneven > 600
    widths = simulation.policy.widths(simulation.rows[:num_rows], 1 << 20, has_prompts=False)
    assert sum(widths[0::20]) > 2 * sum(widths[19::20])
    assert Simulation(model, 0.9, share=share, noise=0.02, uneven_from=10_000).run(num_rows, 800) < even


def test_a_plan_takes_the_most_valuable_drafts() -> None:
    rng, rates = random.Random(3), RowRates(5)
    rows = [state_of(number, [1, 2], [5]) for number in range(40)]
    for state in rows:
        for _ in range(20):
            rates.saw(state, rng.choice([0, 1, state.request.request_id % 6]), 5, weight=0.1)
    levels = rates.levels(rows)
    assert len(set(levels)) > 5
    values = sorted((((level + 0.5) / 16) ** number for level in levels for number in range(1, 6)), reverse=True)
    for num_drafts in (0, 1, 39, 40, 77, 200):
        plan = rates.plan(levels, num_drafts)
        widths = rates.widths(levels, plan)
        assert sum(widths) == len(rows) + num_drafts
        assert 1 <= min(widths) <= max(widths) <= 6
        assert plan.num_right == pytest.approx(sum(values[:num_drafts]))
        right = [sum(((level + 0.5) / 16) ** k for k in range(1, w)) for level, w in zip(levels, widths, strict=True)]
        assert sum(right) == pytest.approx(plan.num_right)


def test_a_row_is_tried_again_after_some_time_without_drafts() -> None:
    rates = RowRates(7)
    copying, writing = state_of(0, [1, 2], [5]), state_of(1, [1, 2], [5])
    for _ in range(20):
        rates.learn([copying, writing], [4, 4], [4, 1])
    (before, after) = rates.rate(writing), 0.0
    for _ in range(100):
        _, after = rates.learn([copying, writing], [4, 1], [4, 1])
    assert before < 0.2 < 0.5 < after < rates.rate(copying)


def test_drafts_that_the_answers_do_not_show_are_found() -> None:
    """Such as those from other answers, in a run that goes on for minutes."""
    simulation = Simulation("8B", 0.7, seen_rate=0.0)
    assert simulation.run(16, 5_000) > 0.99
    assert simulation.run(16, 1_000) > 1.5


def test_drafts_are_found_again_where_the_text_changes() -> None:
    """Also after a long time without."""
    simulation = Simulation("8B", 0.0)
    simulation.run(4, 3_000)
    simulation.accept_rate = 0.8
    assert simulation.run(4, 1_000) > 1.9


def test_drafts_that_do_not_pay_with_many_rows_are_made_with_few() -> None:
    """As at the end of a job, where they are longer."""
    simulation = Simulation("8B", 0.7)
    assert simulation.run(256, 300) > 0.97
    for num_rows, least in ((128, 0.95), (64, 1.15), (16, 2.1), (4, 2.6), (1, 2.6)):
        assert simulation.run(num_rows, 300) > least, num_rows
    assert simulation.width(1) == WIDTHS[-1]


def test_no_drafts_beside_prompts_or_where_a_step_has_no_room() -> None:
    simulation = Simulation("8B", 0.9)
    simulation.run(4, 200)
    assert simulation.width(4, 400) > 1
    assert simulation.width(4, 400, has_prompts=True) == 1
    assert simulation.width(4, 4) == 1
    assert simulation.width(1000, 10_000) == 1


@pytest.mark.parametrize(
    ("model", "gains"),
    [
        ("8B, EAGLE-3", [(1, 900, 2.1), (16, 400, 2.0), (256, 120, 1.15)]),
        ("35B-A3B, MTP", [(16, 300, 1.15), (256, 120, 1.5), (1, 900, 1.1)]),
    ],
)
def test_drafts_of_a_head_are_made_for_few_rows_and_for_many(model: str, gains: list[tuple[int, int, float]]) -> None:
    """One after the other, too: what drafts cost with few rows says little about many."""
    one_after_the_other = Simulation(model, 0.7, has_head=True, noise=0.02, uneven_widths=())
    for num_rows, num_steps, least in gains:
        alone = Simulation(model, 0.7, has_head=True, noise=0.02, uneven_widths=())
        assert alone.run(num_rows, num_steps) > least, num_rows
        assert one_after_the_other.run(num_rows, num_steps) > least, num_rows


@pytest.mark.parametrize("model", WITH_HEADS)
@pytest.mark.parametrize(("num_rows", "num_steps"), [(1, 900), (16, 400), (64, 400), (256, 300)])
def test_a_head_that_is_always_wrong_costs_less_than_a_hundredth(model: str, num_rows: int, num_steps: int) -> None:
    simulation = Simulation(model, 0.0, has_head=True, noise=0.02, uneven_widths=())
    assert simulation.run(num_rows, num_steps) > 0.99
    assert simulation.run(num_rows, 1000) > 0.99


def test_drafts_go_to_the_rows_whose_head_is_surest() -> None:
    """In a run that is long enough for the head to show what it knows; until then all rows have as many."""
    sharing: dict[str, Any] = {"has_head": True, "share": 0.5, "noise": 0.02, **UNEVEN, "most_of_uneven": 6}
    uneven = Simulation("8B, EAGLE-3", 0.95, **sharing)
    even = Simulation("8B, EAGLE-3", 0.95, **{**sharing, "uneven_widths": ()})
    assert uneven.run(64, 300) == even.run(64, 300) < 1.6
    uneven.run(64, 1600)
    assert uneven.run(64, 500) > 1.75
    assert 400 < uneven.num_uneven < 1800


def test_a_head_that_is_sure_at_random_costs_nothing() -> None:
    """In a run of seconds; graphs that only it needs would cost more than a hundredth."""
    sharing: dict[str, Any] = {"has_head": True, "noise": 0.02, **UNEVEN, "most_of_uneven": 6}
    uneven, even = (Simulation("35B-A3B, MTP", 0.7, **{**sharing, **own}) for own in ({}, {"uneven_widths": ()}))
    assert uneven.run(16, 400) > 0.995 * even.run(16, 400)


def test_a_head_is_found_useful_again() -> None:
    simulation = Simulation("8B, EAGLE-3", 0.0, has_head=True, uneven_widths=())
    simulation.run(16, 1000)
    simulation.accept_rate = 0.8
    assert simulation.run(16, 1000) > 1.3


def test_a_head_takes_in_what_its_drafts_need() -> None:
    """Steps with drafts, and prompts until they turn out not to pay."""
    useful, useless = (Simulation("8B, EAGLE-3", rate, has_head=True, uneven_widths=()) for rate in (0.8, 0.0))
    for simulation in (useful, useless):
        assert simulation.policy.extends(has_drafts=False, has_prompts=True)
        assert not simulation.policy.extends(has_drafts=False, has_prompts=False)
        simulation.run(16, 400)
    assert useful.policy.extends(has_drafts=False, has_prompts=True)
    assert not useless.policy.extends(has_drafts=False, has_prompts=True)
    assert not Simulation("8B", 0.8).policy.extends(has_drafts=True, has_prompts=True)


def test_rows_have_different_numbers_of_drafts_where_one_rank_chooses_them() -> None:
    assert engine_config(max_draft_tokens=7).uneven_draft_widths == UNEVEN["uneven_widths"]
    assert engine_config(max_draft_tokens=2, draft_head="mtp").uneven_draft_widths == (1.5, 2.0)
    assert engine_config(max_draft_tokens=7, draft_head="mtp", tensor_parallel_size=2).uneven_draft_widths == ()
    assert engine_config().uneven_draft_widths == ()


def test_always_drafts_as_many_as_there_may_be() -> None:
    policy = DraftPolicy(Drafting(widths=WIDTHS, policy="always", max_step_tokens=64))
    rows = [state_of(number, [1, 2], [5]) for number in range(40)]
    assert policy.widths([], 10_000, has_prompts=True) == []
    for num_rows, width in ((1, 8), (8, 8), (10, 6), (16, 4), (40, 1)):
        assert policy.widths(rows[:num_rows], 10_000, has_prompts=True) == [width] * num_rows
    assert policy.widths(rows[:2], 14, has_prompts=False) == [6, 6]


def test_contexts_that_grow_do_not_count_as_the_cost_of_drafts() -> None:
    costs, plain, drafts = DraftCosts(has_head=True), Form(1), Form(2)
    for _ in range(3):
        costs.learn(16, plain, 0.010, 0.0)
    for number in range(200):
        costs.learn(16, drafts, 0.015 + 0.0001 * number, 0.0)
    assert costs.plain(16) == pytest.approx(0.030, rel=0.05)
    assert costs.ratio(16, drafts) == pytest.approx(35 / 30, rel=0.03)
    for _ in range(4):
        costs.learn(16, plain, 0.030, 0.0)
        costs.learn(16, drafts, 0.040, 0.0)
    assert costs.ratio(16, drafts) > 1.2, "what they add is measured again"


def test_costs_are_known_where_the_first_steps_kept_the_surest_drafts() -> None:
    """They say nothing about others: what these take is guessed, or known from other sizes."""
    costs = DraftCosts(has_head=True)
    for size, drafts, seconds in ((16, Form(2.0, False), 0.03), (256, Form(2), 0.05)):
        for form in (Form(1), drafts, drafts):
            costs.learn(size, form, 0.02 if form == Form(1) else seconds, 0.0)
        assert costs.ratio(16, Form(2.0, False)) == pytest.approx(1.5)
        assert costs.ratio(16, Form(3)) == pytest.approx(1.04 if size == 16 else 1.16, abs=0.01)


def test_drafted_and_accepted_tokens_are_counted() -> None:
    policy = DraftPolicy(Drafting(widths=(3,), policy="always"))
    step = StepInput(
        step_id=0, slots=pack([0, 1, 2]), num_tokens=pack([3, 3, 3]), num_decodes=3, row_limits=pack([9] * 3)
    )
    policy.learn(
        step,
        StepOutput(
            step_id=0, token_ids=b"", counts=pack([1, 3, 0]), drafted=pack([2, 2, 0]), draft_sources=pack([0, 1, 0])
        ),
        [state_of(number, [1, 2], [5]) for number in range(3)],
    )
    assert (policy.num_drafted, policy.num_accepted) == ([2, 2, 0], [0, 2, 0])


def test_figures_of_drafts_are_those_of_all_replicas() -> None:
    replicas = [
        EngineStats(decode_rows=10, drafted=(8, 0, 0), accepted=(5, 0, 0)),
        EngineStats(decode_rows=6, drafted=(2, 3, 0), accepted=(1, 2, 0), forced_tokens=4),
    ]
    figures = SpeculationFigures.of(replicas)
    assert figures is not None
    assert (figures.drafted_tokens, figures.accepted_tokens, figures.tokens_per_step) == (17, 12, 1.75)
    by_source = {source: (of.drafted_tokens, of.accepted_tokens) for source, of in figures.by_source.items()}
    assert by_source == {"lookup": (10, 6), "answers": (3, 2), "grammar": (4, 4)}
    only_own = SpeculationFigures.of(replicas[:1])
    assert only_own is not None
    assert only_own.by_source.keys() == {"lookup"}
    assert SpeculationFigures.of([EngineStats(decode_rows=10)]) is None


def state_of(request_id: int, prompt: list[int], answer: list[int]) -> RequestState:
    request = make_request(request_id, prompt, len(answer) + 9)
    state = RequestState(request, Prompt(request))
    state.generated.extend(answer)
    return state


def test_constrained_requests_alone_make_no_step_try_drafts() -> None:
    """They have none, so every try would be wasted."""
    policy = DraftPolicy(Drafting(widths=(2, 4), policy="auto", accept_rate=1.0))
    constraint = Constraint(grammar="a", end_ids=[7])
    states = [state_of(number, [1, 2] * 20, [1, 2] * 20) for number in range(4)]
    constrained = []
    for state in states:
        request = msgspec.structs.replace(state.request, constraint=constraint)
        constrained.append(RequestState(request, state.prompt, generated=state.generated))
    step = StepInput(step_id=0, slots=pack(range(4)), num_tokens=pack([1] * 4), num_decodes=4)
    for _ in range(60):
        assert policy.widths(constrained, 100, has_prompts=False) == [1] * 4
        policy.learn(step, StepOutput(step_id=0, token_ids=b"", seconds=0.01), constrained)


def test_answers_show_which_drafts_would_have_been_right() -> None:
    evidence = DraftEvidence(4)
    text = list(range(100, 140))
    copied = state_of(0, [*text, 7], text[2:30])
    assert evidence.of(copied) == Outcome(4, 4)
    assert evidence.of(state_of(1, [*text, 7], [*text[2:6], 9, 9, 9])) == Outcome(1, 4), "text[6] is 9"
    assert evidence.of(state_of(2, [1, 2, 3], [5, 6, 8, 9, 10])) == Outcome(0, 4)
    assert evidence.of(state_of(3, [1, 2, 3], [])) is None
    assert evidence.of(state_of(4, [*text[:2], 40, *text[:2]], [40, 100])) == Outcome(2, 2), "a short answer"
    assert evidence.of(state_of(5, [1, 2], [3, 4] * 10)) == Outcome(4, 4), "a loop"
    assert evidence.of(state_of(6, [1, 2], text[11:20])) == Outcome(4, 4), "another answer"
    assert evidence.of(copied) == Outcome(4, 4)


def test_sizes_are_those_to_which_steps_are_padded() -> None:
    sizes = decode_sizes(1024)
    for num_rows in range(1, 1025):
        assert size_of(num_rows) == next(size for size in sizes if size >= num_rows)
