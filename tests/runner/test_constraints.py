"""Answers that follow grammars, by a whole engine: they are complete, and the same however the steps are cut, whoever
runs beside them, and on however many ranks. The model is the built-in one, with its own tokens."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from generation import generate

from nvcli.demo import demo_path
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.core import EngineCore
from nvcli.engine.request import Request, RequestOutput
from nvcli.engine.scheduler import Scheduler
from nvcli.grammars import Vocabulary
from nvcli.messages import StepInput, StepOutput, unpack
from nvcli.runner.interface import PendingOutput
from nvcli.runner.model_runner import ModelRunner
from nvcli.sampling_params import SamplingParams
from nvcli.structured import Constraint, Structured
from one_rank import make_runner, make_scheduler
from requests_factory import make_request

END_IDS = [0, 2]
MAX_TOKENS = 40
MARK = [400, 401]
"""The mark behind which a constraint begins."""

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "parts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["red", "green", None]},
    },
    "required": ["name", "parts", "kind"],
    "additionalProperties": False,
}
WANTED = [
    Structured(json_schema=SCHEMA),
    Structured(regex="[a-f]{4,9}(-[0-9]{2})?"),
    Structured(choice=["95", "94 95", "game wind"]),
    Structured(grammar='root ::= "(" [0-9]? [0-9]? root? ")"'),
]
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.3),
    SamplingParams(temperature=1.0, top_k=5, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.9, presence_penalty=1.0, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, min_tokens=4),
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load(demo_path(), vocab_size=640, end_ids=END_IDS)


@pytest.fixture(scope="module")
def requests(vocabulary: Vocabulary) -> list[Request]:
    """Constrained requests of all kinds, some of them samples of one row, some cut, and others between them."""
    rng = random.Random(3)
    common = [rng.randrange(3, 600) for _ in range(20)]
    made = []
    for number in range(18):
        wanted = WANTED[number % len(WANTED)]
        constraint = Constraint(grammar=vocabulary.compile(wanted), end_ids=END_IDS) if number % 6 < 5 else None
        made.append(
            make_request(
                10 * number,
                common[: rng.randrange(20)] + [rng.randrange(3, 600) for _ in range(rng.randrange(1, 20))],
                3 if number == 8 else MAX_TOKENS,
                stop_ids=END_IDS,
                sampling=SAMPLINGS[number % len(SAMPLINGS)],
                row=number,
                n=3 if number % 7 == 3 else 1,
                constraint=constraint,
            )
        )
    return [sample for request in made for sample in request.samples()]


class Rank:
    """An executor around a runner in this process; outputs are collected when the engine wants them."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._pending: deque[PendingOutput] = deque()

    def submit(self, step: StepInput) -> None:
        pending = self._runner.launch(step)
        assert pending is not None
        self._pending.append(pending)

    def collect(self) -> StepOutput:
        return self._pending.popleft().result()

    def recover(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> int | None:
        return None


def run_here(requests: list[Request], *, num_blocks: int | None = None, **config: Any) -> tuple[Any, Scheduler]:
    runner = make_runner(demo_path(), "cpu", max_model_len=400, block_size=4, kv_cache_memory=64 << 20, **config)
    scheduler = make_scheduler(runner)
    if num_blocks is not None:
        scheduler = Scheduler(scheduler.limits, BlockManager(num_blocks))
    core = EngineCore(scheduler, Rank(runner), max_in_flight=runner.config.max_steps_in_flight)
    core.add(requests)
    outputs: dict[int, RequestOutput] = {}
    while core.has_work:
        outputs.update({output.request_id: output for output in core.step()})
    scheduler.check_integrity()
    assert not runner.constraints._answers or len(runner.constraints._answers) <= runner.config.max_num_seqs
    return found_in(outputs), scheduler


def found_in(outputs: dict[int, RequestOutput]) -> dict[int, tuple[list[int], str | None]]:
    return {number: (unpack(each.token_ids).tolist(), each.finish_reason) for number, each in outputs.items()}


@pytest.fixture(scope="module")
def answers(requests: list[Request]) -> dict[int, tuple[list[int], str | None]]:
    return run_here(requests, max_num_seqs=40)[0]  # type: ignore[no-any-return]


def test_answers_are_complete_or_cut(
    requests: list[Request], answers: dict[int, tuple[list[int], str | None]], vocabulary: Vocabulary
) -> None:
    """Every answer leads through its grammar, and ends where the grammar is complete or the tokens are used up."""
    reasons = []
    for request in requests:
        tokens, reason = answers[request.request_id]
        assert len(tokens) >= request.sampling.min_tokens or request.constraint is not None
        if request.constraint is None:
            continue
        matcher = vocabulary.matcher(request.constraint.grammar)
        is_ended = tokens[-1] in END_IDS
        text = tokens[:-1] if is_ended else tokens
        assert matcher.try_consume_tokens(text) == len(text)
        assert matcher.is_accepting() or not is_ended
        assert reason == ("stop" if is_ended else "length")
        reasons.append(reason)
    assert reasons.count("stop") > 12
    assert "length" in reasons


def test_a_complete_answer_ends_even_before_min_tokens(vocabulary: Vocabulary) -> None:
    """And one that may go on does."""
    sampling = SamplingParams(temperature=0, min_tokens=9)
    found, _ = run_here(
        [
            make_request(
                number,
                [5, 6, 7],
                30,
                stop_ids=END_IDS,
                sampling=sampling,
                constraint=Constraint(grammar=vocabulary.compile(wanted), end_ids=END_IDS),
            )
            for number, wanted in enumerate((Structured(choice=["95"]), Structured(regex="[0-9]+")))
        ]
    )
    assert found[0][0][:-1] == vocabulary.tokenizer.greedy_tokenize("95")
    assert len(found[1][0]) >= 9


def test_a_constraint_begins_behind_its_mark(vocabulary: Vocabulary) -> None:
    """What comes before the mark is free, an end of the answer there too, and what comes behind it is not."""
    grammar = vocabulary.compile(Structured(choice=["95"]))
    biased = SamplingParams(temperature=10.0, logit_bias=dict.fromkeys((*MARK, 402), 100.0))
    waiting = Constraint(grammar=grammar, end_ids=END_IDS, starts_after=MARK)
    requests = [
        make_request(number, [5, 6, 7], 300, stop_ids=END_IDS, sampling=biased, constraint=waiting)
        for number in range(8)
    ]
    found, _ = run_here(requests)
    again, scheduler = run_here(requests, num_blocks=10)
    assert scheduler.stats.num_preemptions > 0
    assert again == found
    for tokens, _ in found.values():
        at = next(i for i in range(len(tokens)) if tokens[i : i + 2] == MARK)
        assert tokens[at + 2 : -1] == vocabulary.tokenizer.greedy_tokenize("95")
        assert tokens[-1] in END_IDS
    assert any(tokens[:2] != MARK for tokens, _ in found.values())


@pytest.mark.parametrize(
    ("circumstance", "config"),
    [
        ("alone", {"max_num_seqs": 1}),
        ("chunked", {"max_num_seqs": 5, "max_num_batched_tokens": 9}),
        ("preempted", {"max_num_seqs": 40, "num_blocks": 60}),
        ("no prefix cache", {"max_num_seqs": 3, "enable_prefix_caching": False}),
    ],
)
def test_answers_do_not_depend_on_the_steps(
    requests: list[Request], answers: dict[int, Any], circumstance: str, config: dict[str, Any]
) -> None:
    found, scheduler = run_here(requests, **config)
    assert found == answers
    assert (scheduler.stats.num_preemptions > 0) == (circumstance == "preempted")


def test_answers_do_not_depend_on_the_ranks(requests: list[Request], answers: dict[int, Any]) -> None:
    """Two stages with several steps in flight, and in each two ranks with masked shards; some requests preempted."""
    some = requests[:10]
    done, stats = generate(
        demo_path(),
        some,
        max_num_seqs=40,
        max_num_batched_tokens=512,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        num_kv_tokens=60,
    )
    assert found_in(done) == {request.request_id: answers[request.request_id] for request in some}
    assert stats.num_preemptions > 0


def test_a_grammar_that_cannot_be_followed_ends_its_own_row(tmp_path: Path, vocabulary: Vocabulary) -> None:
    """Here it is none at all, which the parent would have found out."""
    good = Constraint(grammar=vocabulary.compile(Structured(choice=["95"])), end_ids=END_IDS)
    bad = Constraint(grammar="start: nothing", end_ids=END_IDS)
    runner = make_runner(demo_path(), "cpu", kv_cache_memory=16 << 20)
    scheduler = make_scheduler(runner)
    core = EngineCore(scheduler, Rank(runner), max_in_flight=2)
    core.add(make_request(i, [5], 9, stop_ids=END_IDS, constraint=c) for i, c in enumerate((good, bad, None)))
    outputs = {}
    while core.has_work:
        outputs.update({output.request_id: output for output in core.step()})
    assert [outputs[i].finish_reason for i in range(2)] == ["stop", "error"]
    assert outputs[1].error_type == "structured_too_complex"
    assert "behind token 0 of the answer" in outputs[1].error
    assert len(outputs[1].token_ids) == 0
