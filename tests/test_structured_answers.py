"""Structured answers from a row to its answer, by a real engine and the built-in model: all of them parse, and their
schemas allow them. `scripts/structured_rows.py` does the same for more rows."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nvcli import LLM
from nvcli.core.config import load_sourced_config
from nvcli.tools.check.check import CheckOptions, check_job
from nvcli.tools.check.progress import CheckProgress
from schema_maker import make_schemas
from structured_rows import blank_tokens, describe_fault, make_rows

pytestmark = pytest.mark.usefixtures("warm_engines")

NUM_SCHEMAS, NUM_ROWS = 12, 48
NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["n"],
    "additionalProperties": False,
}
BAD_ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "sampling": {"structured": {"json_schema": {"properties": {"b": {"type": "strng"}}}}}},
    {"prompt": "a", "sampling": {"structured": {"json_schema": {"$ref": "#"}}}},
    {"prompt": "a", "sampling": {"structured": {"regex": "(a"}}},
    {
        "custom_id": "c",
        "url": "/v1/completions",
        "body": {"prompt": "a", "guided_json": {"properties": {"b": {"not": {}}}}},
    },
]
MESSAGES = [
    "`sampling.structured.json_schema` cannot be used: Invalid type: strng (at #/properties/b)",
    "`sampling.structured.json_schema` cannot be used: no text can match it, or it is too complex",
    "`sampling.structured.regex` cannot be used: ",
    'the json_schema that `body` asks for cannot be used: Unimplemented keys: ["not"] (at #/properties/b)',
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_num_seqs=24) as llm:
        yield llm


def test_every_answer_parses_and_is_allowed_by_its_schema(llm: LLM) -> None:
    """Greedy and sampled, with penalties and top-k; and the same again, whatever runs beside it."""
    schemas = make_schemas(NUM_SCHEMAS, seed=5)
    rows = make_rows(NUM_ROWS, schemas, biases=blank_tokens("demo"))
    answers = list(llm.generate(rows, order="input"))
    faults = [describe_fault(answer, schemas[number % NUM_SCHEMAS]) for number, answer in enumerate(answers)]
    assert [fault for fault in faults if fault] == []
    assert all(answer.finish_reason == "stop" for answer in answers)
    some = [{**row, "sampling": {**row["sampling"], "seed": 3}} for row in rows[:6]]
    alone = [answer.text for row in some for answer in llm.generate([row])]
    assert [answer.text for answer in llm.generate(some, order="input")] == alone


def test_other_forms_in_rows_of_both_kinds(llm: LLM) -> None:
    chat = [{"role": "user", "content": "What is 3 + 4?"}]
    url = "/v1/chat/completions"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": NUMBER}}
    rows: list[Any] = [
        {"messages": chat, "sampling": {"structured": {"regex": "[a-z]{3}[0-9]{2}"}, "n": 2}},
        {"messages": chat, "sampling": {"structured": {"choice": ["8", "seven"]}, "temperature": 0, "logprobs": 1}},
        {"messages": chat, "sampling": {"structured": {"grammar": 'root ::= "<" [0-9] ">"'}, "stop": ">"}},
        {"messages": chat, "sampling": {"max_tokens": 5, "temperature": 0}},
        {"custom_id": "a", "url": url, "body": {"messages": chat, "response_format": schema, "max_tokens": 80}},
        {"custom_id": "b", "url": url, "body": {"messages": chat, "structured_outputs": {"choice": ["x", "y"]}}},
        *BAD_ROWS,
    ]
    forms, choice, stopped, free, written, chosen, *bad = llm.generate(rows, order="input")
    assert all(re.fullmatch("[a-z]{3}[0-9]{2}", text) for text in forms.texts)
    assert (choice.text, choice.finish_reason) in [("8", "stop"), ("seven", "stop")]
    assert re.fullmatch("<[0-9]", stopped.text)
    assert free.text == "7"
    assert "n" in json.loads(written.text)
    assert chosen.text in ("x", "y")
    assert [answer.error.type for answer in bad if answer.error is not None] == ["invalid_structured"] * len(BAD_ROWS)
    assert all(message in str(answer.error) for answer, message in zip(bad, MESSAGES, strict=True))
    (default,) = llm.generate(["What is 3 + 4?\n"], sampling={"structured": {"choice": ["yes"]}})
    assert default.text == "yes"


def test_a_check_names_the_rows_whose_schemas_cannot_be_used(tmp_path: Path) -> None:
    good = {"prompt": "a", "sampling": {"structured": {"json_schema": NUMBER}}}
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [good, *BAD_ROWS]))
    run, source = load_sourced_config(None, (), {"--model": "demo"})
    options, progress = CheckOptions(num_prompts=0), CheckProgress(io.StringIO())
    report = check_job(run, source, inputs=[str(path)], options=options, progress=progress).report
    assert (report.rows, report.rows_failed) == (5, 4)
    (example,) = report.errors
    assert example.type == "invalid_structured"
    assert MESSAGES[0] in example.message
