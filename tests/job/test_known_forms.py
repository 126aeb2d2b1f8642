"""Rows of well-known data sets: ShareGPT's conversations, Alpaca's instructions, messages as JSON text."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nvcli.job.job import Job, JobResult
from nvcli.job.rows.native_row import RowKeys
from nvcli.job.rows.parser import Cells, RowParser
from nvcli.job.rows.prompt_rules import PromptKind, PromptRules

TURNS = [
    {"from": "system", "value": "s"},
    {"from": "human", "value": "q", "weight": 1},
    {"from": "gpt", "value": "a"},
    {"from": "human", "value": "r"},
]
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q", "weight": 1},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "r"},
]


def parse(row: Any, parser: RowParser | None = None) -> Job | JobResult:
    line = msgspec.json.encode(row) if isinstance(row, dict) else row
    return (parser or RowParser({})).parse(line, index=0, where="line 1")


def job_of(row: Any, parser: RowParser | None = None) -> Job:
    job = parse(row, parser)
    assert isinstance(job, Job), job
    return job


def error_of(row: Any, parser: RowParser | None = None) -> str:
    result = parse(row, parser)
    assert isinstance(result, JobResult)
    assert result.error is not None
    return f"{result.error.type}: {result.error.message}"


@pytest.mark.parametrize("value", [TURNS, MESSAGES, msgspec.json.encode(TURNS).decode()])
@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_conversations(key: str, value: Any) -> None:
    job = job_of({"id": "a", key: value, "source": 1})
    assert job.messages == MESSAGES
    assert list(job.context.extra) == ["source"]
    if isinstance(value, str):  # as a CSV file has it
        assert job_of(Cells({key: value})).messages == MESSAGES


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"conversations": [{"from": "alien", "value": "x"}]}, "invalid_value: line 1: `conversations[0].from` is "),
        ({"conversations": [{"from": "human"}]}, "`conversations[0]` has no `content`"),
        ({"conversations": '[{"from": '}, "invalid_value: line 1: `conversations` is "),
        ({"conversations": "[" * 500 + "]" * 500}, "nested"),
        ({"messages": "[1"}, "which is not JSON"),
        ({"conversations": 3}, "missing_prompt"),
        ({"instruction": "i", "context": "c", "response": "r"}, "missing_prompt"),
        ({"instruction": "i", "input": 5}, "missing_prompt"),
        ({"instruction": "", "input": "x"}, "missing_prompt"),
    ],
)
def test_rows_that_are_not_quite_of_a_known_form(row: dict[str, Any], message: str) -> None:
    assert message in error_of(row)


def test_instructions() -> None:
    job = job_of({"instruction": "Add.", "input": "1 and 2", "output": "3", "id": 7})
    assert (job.prompt, job.messages, job.context.id) == ("Add.\n\n1 and 2", None, 7)
    assert list(job.context.extra) == ["output"]
    assert job_of({"instruction": "Add.", "input": "", "output": "3"}).prompt == "Add."
    assert job_of({"instruction": "Add.", "output": "3"}).prompt == "Add."
    rules = PromptRules(chat=frozenset({PromptKind.INSTRUCTION}), system="s")
    assert job_of({"instruction": "Add.", "input": "1"}, RowParser({}, rules=rules)).messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "Add.\n\n1"},
    ]


def test_a_job_that_names_its_keys_has_no_known_forms() -> None:
    row = {"instruction": "i", "input": "x", "conversations": TURNS}
    assert "none of `q`" in error_of(row, RowParser({}, RowKeys(prompt="q")))
    assert job_of({**row, "prompt": "p"}).prompt == "p"
    assert "none of `prompt`" in error_of(row, RowParser({}, RowKeys(id="instruction")))


def test_a_bad_value_costs_the_row_its_id_in_every_run() -> None:
    row = b'{"id": "a", "instruction": "i", "input": ' + b"9" * 5000 + b"}"
    parsed = parse(row)
    assert isinstance(parsed, JobResult)
    identity = RowParser({}).identify(row, index=0)
    assert (parsed.context.id, parsed.context.is_named) == (identity.id, identity.is_named)
