"""`scripts/fuzz_rows.py`: mutated rows become what the documentation asks for, and the oracle would notice if not."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from fuzz_rows import Fuzzer, run_here, time_limit
from nvcli.demo import demo_path
from row_oracle import JobFacts, Oracle, check

TOKENIZER = demo_path() / "tokenizer.json"
FACTS = JobFacts(max_model_len=64, vocab_size=640)


def test_mutated_rows(tmp_path: Path) -> None:
    fuzzer = Fuzzer(tmp_path, random.Random(1), run_here)
    with time_limit(60):
        while fuzzer.num_rows < 600 or not (fuzzer.num_continued and fuzzer.num_updated):
            fuzzer.job(300)
    assert len(fuzzer.errors) >= 10


@pytest.mark.parametrize(
    ("line", "errors"),
    [
        (b'{"prompt": "a"}', set()),
        (b'{"prompt": "a", "kept": 1e999}', set()),
        (b'{"prompt": "a", "id": 1e999}', {"invalid_json"}),
        (b'{"prompt": "a", "kept": NaN}', set()),
        (b'{"prompt": "a", "id": NaN}', set()),
        (b'{"prompt": "a", "sampling": {"n": NaN}}', {"invalid_json"}),
        (b'{"prompt": "a", "kept": "\\ud800"}', {"invalid_json"}),
        (b'{"prompt": "a", "kept": "\xff"}', {"invalid_json"}),
        (b'{"prompt": "a", "kept": ' + b"[" * 400 + b"]" * 400 + b"}", {"invalid_json"}),
        (b"[]", {"not_an_object"}),
        (b'{"prompt": "", "sampling": {"n": 2}}', {"empty_prompt"}),
        (b'{"prompt": 1, "sampling": {"top_p": 0}}', {"invalid_value", "invalid_sampling"}),
        (b'{"custom_id": "a", "body": {}}', {"unsupported_url"}),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a", "top_p": null}}', set()),
        (b'{"custom_id": "a", "prompt": "a", "body": {}}', set()),
        (b'{"prompt_token_ids": [640]}', {"token_out_of_vocabulary"}),
        (b'{"prompt": "' + b"a b " * 40 + b'"}', {"prompt_too_long"}),
    ],
)
def test_what_the_oracle_expects(line: bytes, errors: set[str]) -> None:
    (expected,) = Oracle(FACTS, TOKENIZER).expect(line)
    assert expected.errors == errors


def answer(**changes: Any) -> bytes:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0}
    row = {"id": "r", "index": 0, "choices": [{}], "usage": usage, "error": None, "kept": [1], **changes}
    return json.dumps({key: value for key, value in row.items() if value is not ...}).encode()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index": 1}, "index is 1"),
        ({"id": 1}, "id is"),
        ({"choices": []}, "choices is 0"),
        ({"kept": ...}, "passed is {}"),
        ({"kept": [1.0]}, "passed is"),
        ({"other": 1}, "passed is"),
        ({"choices": [], "usage": {"prompt_tokens": 0}, "error": {"type": "invalid_value", "message": ""}}, "error is"),
        ({"usage": {"prompt_tokens": 2}}, "prompt tokens is 2"),
    ],
)
def test_an_output_row_that_is_not_as_it_must_be_is_noticed(changes: dict[str, Any], message: str) -> None:
    (expected,) = Oracle(FACTS, TOKENIZER).expect(b'{"id": "r", "prompt": "a", "kept": [1]}')
    assert check(answer(), expected) is None
    assert message in (check(answer(**changes), expected) or "")


def logprobs(*values: float | None) -> dict[str, Any]:
    return {"tokens": ["a"] * len(values), "token_logprobs": [*values], "top_logprobs": [None] * len(values)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_logprobs": ...}, "prompt_logprobs is False"),
        ({"prompt_logprobs": logprobs(None, -1.0)}, "tokens of prompt_logprobs is 2"),
        ({"prompt_logprobs": {**logprobs(None), "tokens": []}}, "tokens of prompt_logprobs is -1"),
        ({"choices": [{"logprobs": logprobs(-1.0)}]}, "nulls of logprobs is []"),
        ({"choices": [{"logprobs": logprobs(None)}]}, "logprobs of tokens is False"),
        ({"choices": [{"logprobs": logprobs(None, -1.0, -1.0)}]}, "logprobs of tokens is False"),
    ],
)
def test_log_probabilities_of_a_prompt_that_are_not_as_they_must_be_are_noticed(
    changes: dict[str, Any], message: str
) -> None:
    wish = b'{"echo": true, "logprobs": 0, "prompt_logprobs": 0}'
    (expected,) = Oracle(FACTS, TOKENIZER).expect(b'{"id": "r", "prompt": "a", "kept": [1], "sampling": %s}' % wish)
    right = {"prompt_logprobs": logprobs(None), "choices": [{"logprobs": logprobs(None, -1.0)}]}
    assert check(answer(**right), expected) is None
    assert message in (check(answer(**{**right, **changes}), expected) or "")


def test_a_job_that_hangs_is_ended() -> None:
    with pytest.raises(AssertionError, match="longer than 1 s"), time_limit(1):
        time.sleep(5)
