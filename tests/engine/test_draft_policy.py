"""Policies of drafts, simulated: steps whose costs and acceptance are known."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from nvcli.core.messages import StepInput, StepOutput, pack
from nvcli.engine.draft_costs import size_of
from nvcli.engine.draft_evidence import DraftEvidence, Outcome
from nvcli.engine.draft_policy import Drafting, DraftPolicy
from nvcli.engine.request import EngineStats, SpeculationFigures
from nvcli.engine.state import Prompt, RequestState
from nvcli.sizing.graph_sizes import decode_sizes
from requests_factory import make_request

WIDTHS = (2, 3, 4, 6, 8)
CAPTURE_SECONDS, NEW_SECONDS = 0.03, 4e-4
"""How long the device waits while the graph of a shape is captured, and how much longer its first step takes."""


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

    def seconds(self, num_rows: int, width: int) -> float:
        tokens = self.token * max(0, num_rows * width - self.free_tokens)
        drafts = self.drafts + num_rows * self.row_drafts if width > 1 else 0.0
        return 1e-6 * (self.least + tokens + num_rows * self.row + drafts)


MODELS = {
    "0.6B": Costs(950, 0, 2.9, 5, 200, 5.5),
    "8B": Costs(4820, 64, 20, 3.6, 300, 12),
    "8B, fast attention": Costs(4820, 64, 20, 3.6, 100, 1),
    "30B-A3B": Costs(6000, 0, 8, 20, 200, 5),
}


class Simulation:
    """The steps of one run."""

    def __init__(self, model: str, accept_rate: float, *, seen_rate: float | None = None, noise: float = 0.0) -> None:
        """`seen_rate`: the share of drafts that seems to be right in the answers; None: the same."""
        seen = accept_rate if seen_rate is None else seen_rate
        self.policy = DraftPolicy(Drafting(widths=WIDTHS, max_step_tokens=1024, accept_rate=seen))
        self.costs, self.accept_rate, self.noise = MODELS[model], accept_rate, noise
        self.rng = random.Random(1)
        self.captured: set[tuple[int, int]] = set()
        self.states = [RequestState(request, Prompt(request)) for request in [make_request(0, [1, 2], 9)]]
        self.states[0].generated.append(5)

    def run(self, num_rows: int, num_steps: int) -> float:
        """Run so many steps; return the gain over steps without drafts."""
        rng, seconds, tokens = self.rng, 0.0, 0.0
        in_flight: list[tuple[StepInput, StepOutput]] = []
        for number in range(num_steps):
            width = self.policy.width(num_rows, 1 << 20, has_prompts=False)
            counts = [accepted(rng, width, self.accept_rate) for _ in range(min(num_rows, 32))]
            counts = (counts * (-(-num_rows // len(counts))))[:num_rows]
            took = self.costs.seconds(num_rows, width) * (1 + rng.uniform(-self.noise, self.noise))
            is_new = width > 1 and (size_of(num_rows), width) not in self.captured
            idle = CAPTURE_SECONDS if is_new else 0.0
            took += NEW_SECONDS if is_new else 0.0
            self.captured.add((size_of(num_rows), width))
            step = StepInput(
                step_id=number,
                slots=pack(range(num_rows)),
                num_tokens=pack([width] * num_rows),
                num_logits=pack([width] * num_rows),
                num_decodes=num_rows,
                row_limits=pack([1000] * num_rows) if width > 1 else b"",
            )
            output = StepOutput(step_id=number, token_ids=b"", counts=pack(counts), seconds=took, idle_seconds=idle)
            in_flight.append((step, output))
            if len(in_flight) > 1:
                self.policy.learn(*in_flight.pop(0), self.states)
            seconds += took + idle
            tokens += sum(counts) / num_rows
        return tokens / seconds * self.costs.seconds(num_rows, 1)


def accepted(rng: random.Random, width: int, accept_rate: float) -> int:
    """The tokens that a row of this width gives."""
    count = 1
    while count < width and rng.random() < accept_rate:
        count += 1
    return count


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
    plain = num_steps * simulation.costs.seconds(num_rows, 1)
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
    assert Simulation(model, 0.7, noise=0.02).run(num_rows, 2_000) > least


@pytest.mark.parametrize(("model", "num_rows", "rate"), [("0.6B", 16, 0.3), ("0.6B", 128, 0.5), ("8B", 64, 0.3)])
def test_drafts_that_do_not_pay_cost_less_than_a_hundredth(model: str, num_rows: int, rate: float) -> None:
    """In a run of seconds; a try or two cost more of a shorter one."""
    assert Simulation(model, rate, noise=0.02).run(num_rows, 4_000) > 0.99


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
    simulation.policy._evidence = DraftEvidence(7, 0.8)
    assert simulation.run(4, 1_000) > 1.9


def test_drafts_that_do_not_pay_with_many_rows_are_made_with_few() -> None:
    """As at the end of a job, where they are longer."""
    simulation = Simulation("8B", 0.7)
    assert simulation.run(256, 300) > 0.97
    for num_rows, least in ((128, 0.96), (64, 1.2), (16, 2.2), (4, 2.6), (1, 2.6)):
        assert simulation.run(num_rows, 300) > least, num_rows
    assert simulation.policy.width(1, 1 << 20, has_prompts=False) == WIDTHS[-1]


def test_no_drafts_beside_prompts_or_where_a_step_has_no_room() -> None:
    simulation = Simulation("8B", 0.9)
    simulation.run(4, 200)
    policy = simulation.policy
    assert policy.width(4, 400, has_prompts=False) > 1
    assert policy.width(4, 400, has_prompts=True) == 1
    assert policy.width(4, 4, has_prompts=False) == 1
    assert policy.width(1000, 10_000, has_prompts=False) == 1


def test_always_drafts_as_many_as_there_may_be() -> None:
    policy = DraftPolicy(Drafting(widths=WIDTHS, policy="always", max_step_tokens=64))
    assert [policy.width(rows, 10_000, has_prompts=True) for rows in (0, 1, 8, 10, 16, 40)] == [1, 8, 8, 6, 4, 1]
    assert policy.width(2, 14, has_prompts=False) == 6


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
    )
    assert (policy.num_drafted, policy.num_accepted) == ([2, 2], [0, 2])


def test_figures_of_drafts_are_those_of_all_replicas() -> None:
    replicas = [
        EngineStats(decode_rows=10, drafted=(8, 0), accepted=(5, 0)),
        EngineStats(decode_rows=6, drafted=(2, 3), accepted=(1, 2), forced_tokens=4),
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
