"""Answers that follow grammars, by a whole engine: they are complete, and the same however the steps are cut, whoever
runs beside them, and on however many ranks. The model is the built-in one, with its own tokens."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from generation import generate

from constrained_requests import (
    END_IDS,
    Answers,
    assert_follow_grammars,
    found_in,
    load_vocabulary,
    make_requests,
    run_here,
)
from nvcli.core.grammars import Vocabulary
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.structured import Constraint, Structured
from nvcli.demo import demo_path
from nvcli.engine.request import Request
from one_rank import make_core, make_runner, run_core
from requests_factory import make_request

MARK = [400, 401]
"""The mark behind which a constraint begins."""


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary()


@pytest.fixture(scope="module")
def requests(vocabulary: Vocabulary) -> list[Request]:
    return make_requests(vocabulary)


@pytest.fixture(scope="module")
def answers(requests: list[Request]) -> Answers:
    return run_here(requests, max_num_seqs=40)[0]


def test_answers_are_complete_or_cut(requests: list[Request], answers: Answers, vocabulary: Vocabulary) -> None:
    assert_follow_grammars(requests, answers, vocabulary)
    free = [request for request in requests if request.constraint is None]
    assert all(len(answers[request.request_id][0]) >= request.sampling.min_tokens for request in free)
    reasons = [answers[request.request_id][1] for request in requests if request.constraint is not None]
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
    """What comes before the mark is free, an end of the answer there too unless there must be an answer, and what comes
    behind it is not."""
    grammar = vocabulary.compile(Structured(choice=["95"]))
    biased = SamplingParams(temperature=10.0, logit_bias=dict.fromkeys((*MARK, 402), 100.0))
    waiting = Constraint(grammar=grammar, end_ids=END_IDS, starts_after=MARK)
    requests = [
        make_request(number, [5, 6, 7], 300, stop_ids=END_IDS, sampling=biased, constraint=waiting)
        for number in range(4)
    ]
    found, _ = run_here(requests)
    again, scheduler = run_here(requests, num_blocks=6)
    assert scheduler.stats.num_preemptions > 0
    assert again == found
    for tokens, _ in found.values():
        at = next(i for i in range(len(tokens)) if tokens[i : i + 2] == MARK)
        assert tokens[at + 2 : -1] == vocabulary.tokenizer.greedy_tokenize("95")
        assert tokens[-1] in END_IDS
    assert any(tokens[:2] != MARK for tokens, _ in found.values())
    ends = SamplingParams(temperature=0.0, logit_bias={**dict.fromkeys(MARK, 20.0), END_IDS[0]: 100.0})
    must = [msgspec.structs.replace(waiting, must_begin=must_begin) for must_begin in (False, True)]
    found, _ = run_here(
        [
            make_request(number, [5, 6, 7], 40, stop_ids=END_IDS, sampling=ends, constraint=constraint)
            for number, constraint in enumerate(must)
        ]
    )
    assert [found[number][0] == [END_IDS[0]] for number in range(2)] == [True, False]


def test_an_answer_may_begin_its_free_part_or_not(vocabulary: Vocabulary) -> None:
    """With the first mark it is free up to the last one; without, it is constrained from its first token on."""
    constraint = Constraint(
        grammar=vocabulary.compile(Structured(choice=["95"])), end_ids=END_IDS, starts_after=MARK, opens_with=[410, 411]
    )
    opens = {410: 100.0, **dict.fromkeys(MARK, 100.0)}
    requests = [
        make_request(
            number,
            [5, 6, 7],
            300,
            stop_ids=END_IDS,
            sampling=SamplingParams(temperature=10.0 if number else 0.0, logit_bias=opens if number else {}),
            constraint=constraint,
        )
        for number in range(6)
    ]
    found, _ = run_here(requests)
    answer = vocabulary.tokenizer.greedy_tokenize("95")
    assert found[0][0][:-1] == answer
    for number in range(1, 6):
        tokens, _ = found[number]
        assert tokens[:2] == [410, 411]
        at = next(i for i in range(len(tokens)) if tokens[i : i + 2] == MARK)
        assert tokens[at + 2 : -1] == answer
    again, scheduler = run_here(requests, num_blocks=10)
    assert scheduler.stats.num_preemptions > 0
    assert again == found


@pytest.mark.parametrize(
    ("circumstance", "config"),
    [
        ("chunked", {"max_num_seqs": 5, "max_num_batched_tokens": 9}),
        ("preempted", {"max_num_seqs": 40, "num_blocks": 30}),
        ("alone, no prefix cache", {"max_num_seqs": 1, "enable_prefix_caching": False}),
    ],
)
def test_answers_do_not_depend_on_the_steps(
    requests: list[Request], answers: Answers, circumstance: str, config: dict[str, Any]
) -> None:
    some = requests[::3] if config["max_num_seqs"] == 1 else requests
    found, scheduler = run_here(some, **config)
    assert found == {request.request_id: answers[request.request_id] for request in some}
    assert (scheduler.stats.num_preemptions > 0) == (circumstance == "preempted")


@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_parallel_size": 2, "num_kv_tokens": 60},
        {"enable_attention_dp": True, "num_kv_tokens": 120, "plan_admission": False},
    ],
    ids=["stages", "attention by rows"],
)
def test_answers_do_not_depend_on_the_ranks(requests: list[Request], answers: Answers, layout: dict[str, Any]) -> None:
    """Two stages with several steps in flight, and in each two ranks with masked shards; or two ranks that compute the
    attention of different requests. Some requests are preempted."""
    some = requests[:10]
    done, stats = generate(
        demo_path(),
        some,
        max_num_seqs=40,
        max_num_batched_tokens=512,
        tensor_parallel_size=2,
        **layout,
    )
    assert found_in(done) == {request.request_id: answers[request.request_id] for request in some}
    assert stats.num_preemptions > 0


def test_a_grammar_that_cannot_be_followed_ends_its_own_row(vocabulary: Vocabulary) -> None:
    """Here it is none at all, which the parent would have found out."""
    good = Constraint(grammar=vocabulary.compile(Structured(choice=["95"])), end_ids=END_IDS)
    bad = Constraint(grammar="start: nothing", end_ids=END_IDS)
    runner = make_runner(demo_path(), "cpu", kv_cache_memory=16 << 20)
    requests = [make_request(i, [5], 9, stop_ids=END_IDS, constraint=c) for i, c in enumerate((good, bad, None))]
    outputs = run_core(make_core(runner), requests)
    assert [outputs[i].finish_reason for i in range(2)] == ["stop", "error"]
    assert outputs[1].error_type == "structured_too_complex"
    assert "after token 0 of the answer" in outputs[1].error
    assert len(outputs[1].token_ids) == 0
