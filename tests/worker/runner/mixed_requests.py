"""Requests of all kinds for a model with the vocabulary of the built-in one, and the comparison of two runs of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from constrained_requests import END_IDS, WANTED, load_vocabulary
from nvcli.core.messages import unpack
from nvcli.core.sampling_params import SamplingParams, StopRepetition
from nvcli.core.structured import Constraint
from nvcli.engine.request import PromptScoring, Request, RequestOutput, ThoughtLimit
from requests_factory import make_request

NEWLINE = 5
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.7, seed=5),
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(temperature=0.4, top_k=20, top_p=0.9),
    SamplingParams(temperature=0, repetition_penalty=1.05),
    SamplingParams(temperature=0.3, presence_penalty=0.2, frequency_penalty=0.1, logprobs=0),
    SamplingParams(temperature=0, min_tokens=25),
    SamplingParams(temperature=0, allowed_token_ids=list(range(30, 60))),
    SamplingParams(temperature=0.2, min_p=0.1),
    SamplingParams(temperature=0, stop_repetition=StopRepetition(max_pattern_size=4, min_count=3, min_tokens=12)),
]


def mixed_requests(num_rows: int) -> list[Request]:
    """Rows of all kinds, most of them long enough to repeat what was there before."""
    rng, vocabulary = random.Random(4), load_vocabulary()
    common = [rng.randrange(20, 600) for _ in range(24)]
    made = []
    for number in range(num_rows):
        prompt = common[: rng.randrange(25)] + [rng.randrange(20, 600) for _ in range(rng.randrange(1, 12))]
        fields: dict[str, Any] = {"sampling": SAMPLINGS[number % len(SAMPLINGS)], "n": 1 + (number % 9 == 2)}
        if number % 7 == 3:
            constraint = Constraint(grammar=vocabulary.compile(WANTED[number // 7 % len(WANTED)]), end_ids=END_IDS)
            fields |= {"constraint": constraint, "sampling": SAMPLINGS[number % 3]}
        if number % 7 == 3 or number % 4 == 1:
            fields["stop_ids"] = END_IDS
        if number % 5 == 4 and number % 7 != 3:
            fields["thought_limit"] = ThoughtLimit(
                budget=rng.randrange(1, 30), start_ids=[], ends=[[NEWLINE]], forced_ids=[NEWLINE, 40]
            )
        if number % 6 == 5:
            fields["read"] = PromptScoring(first=1, num_top=1)
        if number % 8 == 6:
            fields["bad_words"] = [[rng.randrange(20, 600), rng.randrange(20, 600)] for _ in range(3)]
        if number % 10 == 7:
            fields["stream"] = False
        made.append(make_request(10 * number, prompt, rng.choice([1, 2, 7, 40, 90]), row=number, **fields))
    return made


def samples_of(requests: list[Request]) -> list[Request]:
    return [sample for request in requests for sample in request.samples()]


def assert_equal(found: dict[int, RequestOutput], expected: dict[int, RequestOutput]) -> None:
    assert found.keys() == expected.keys()
    for number, wanted in expected.items():
        output = found[number]
        assert unpack(output.token_ids).tolist() == unpack(wanted.token_ids).tolist(), number
        assert (output.finish_reason, output.stopped_by_id) == (wanted.finish_reason, wanted.stopped_by_id)
        assert [entry.top_ids for entry in output.logprobs] == [entry.top_ids for entry in wanted.logprobs]
        logprobs = [entry.logprob for entry in wanted.logprobs]
        assert [entry.logprob for entry in output.logprobs] == pytest.approx(logprobs, abs=1e-4)
        read = [result.best_ids for result in wanted.query_results]
        assert b"".join(result.best_ids for result in output.query_results) == b"".join(read)
