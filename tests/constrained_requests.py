"""Constrained requests of all kinds for the built-in model, and an engine around a rank in this process."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

from nvcli.core.grammars import Vocabulary
from nvcli.core.messages import unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.structured import Constraint, Structured
from nvcli.demo import demo_path
from nvcli.engine.request import Request, RequestOutput
from nvcli.engine.scheduler import Scheduler
from one_rank import make_core, make_runner, make_scheduler, run_core
from requests_factory import make_request

END_IDS = [0, 2]
MAX_TOKENS = 40
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


Answers = dict[int, tuple[list[int], str | None]]
"""By request id: the tokens, and why the answer ended."""


def load_vocabulary(end_ids: Sequence[int] = END_IDS) -> Vocabulary:
    return Vocabulary.load(demo_path(), vocab_size=640, end_ids=end_ids)


def make_requests(vocabulary: Vocabulary) -> list[Request]:
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


def run_here(
    requests: Iterable[Request], *, device: str = "cpu", num_blocks: int | None = None, **config: Any
) -> tuple[Answers, Scheduler]:
    """Answer requests by one rank, with steps in flight; `num_blocks` is of the KV cache."""
    own = {"max_model_len": 400, "block_size": 4, "kv_cache_memory": 64 << 20} if device == "cpu" else {}
    runner = make_runner(demo_path(), device, **{**own, **config})
    scheduler = make_scheduler(runner, num_blocks)
    outputs = run_core(make_core(runner, scheduler), requests)
    scheduler.check_integrity()
    return found_in(outputs), scheduler


def assert_follow_grammars(requests: Iterable[Request], answers: Answers, vocabulary: Vocabulary) -> None:
    """Every answer leads through its grammar, and ends where the grammar is complete or the tokens are used up."""
    for request in requests:
        tokens, reason = answers[request.request_id]
        if request.constraint is None:
            continue
        matcher = vocabulary.matcher(request.constraint.grammar)
        is_ended = tokens[-1] in END_IDS
        text = tokens[:-1] if is_ended else tokens
        assert matcher.try_consume_tokens(text) == len(text)
        assert matcher.is_accepting() or not is_ended
        assert reason == ("stop" if is_ended else "length")


def found_in(outputs: dict[int, RequestOutput]) -> Answers:
    return {number: (unpack(each.token_ids).tolist(), each.finish_reason) for number, each in outputs.items()}
