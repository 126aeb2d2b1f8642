"""Rows that are scored or embedded become jobs or typed errors, whatever they hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvcli.core.config import load_run_config
from nvcli.core.task_config import ScoreConfig
from nvcli.errors import ConfigError
from nvcli.job.job import EmbedTask, Job, JobResult, RowForm, ScoreTask
from nvcli.job.rows.parser import Cells, RowParser
from nvcli.job.rows.task_rows import EmbedRows, ScoreRows, TaskRows

SCORE, EMBED = ScoreRows(ScoreConfig()), EmbedRows(EmbedTask())


def parse(row: Any, task: TaskRows = SCORE) -> Job | JobResult:
    line = row if isinstance(row, Cells) else json.dumps(row).encode()
    return RowParser({}, task=task).parse(line, index=0, where="line 1")


def scored(row: Any) -> ScoreTask:
    job = parse(row)
    assert isinstance(job, Job), job
    assert isinstance(job.task, ScoreTask)
    assert job.context.form is RowForm.SCORE
    return job.task


def test_choices_with_labels() -> None:
    """As in ARC, OpenBookQA and CommonsenseQA."""
    choices = {"text": ["a", "2"], "label": ["1", "2"]}
    for each in (choices, json.dumps(choices)):
        task = scored({"prompt": "p", "choices": each, "answer": "2"})
        assert (task.continuations, task.answer) == (("a", "2"), 1)
    assert {scored({"prompt": "p", "choices": choices, "answer": each}).answer for each in ("1", 1, 1.0)} == {0}
    assert scored({"prompt": "p", "choices": choices, "answer": "a"}).answer == 0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (1, 1),
        ("B", 1),
        ("b", 1),
        ("1", 1),
        ("A", 0),
        (None, None),
        ("", None),
        (-1, None),
        ("C", 2),
        ("c", 2),
        ("0", 0),
        (1.0, 1),
    ],
)
def test_the_right_choice_is_named_in_three_ways(answer: Any, expected: int | None) -> None:
    """A text that is a choice comes before letters and numbers."""
    assert scored({"prompt": "p", "choices": ["a", "b", "C"], "answer": answer}).answer == expected


def test_other_keys_are_copied_and_sampling_too() -> None:
    row = {"prompt": "p", "continuation": "c", "answer": {"any": "thing"}, "sampling": {"n": "?"}, "temperature": 3}
    job = parse(row)
    assert isinstance(job, Job)
    assert {key: json.loads(bytes(value)) for key, value in job.context.extra.items()} == {
        key: row[key] for key in ("answer", "sampling", "temperature")
    }
    assert (job.sampling.max_tokens, job.sampling.temperature) == (1, 0)


def test_choices_of_a_table_are_json_in_a_cell() -> None:
    task = scored(Cells({"prompt": "p", "choices": '["a", "b"]', "answer": "1"}))
    assert (task.continuations, task.answer) == (("a", "b"), 1)
    bad = parse(Cells({"prompt": "p", "choices": "[a, b]"}))
    assert isinstance(bad, JobResult)
    assert bad.error is not None
    assert bad.error.type == "invalid_value"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
KEYS = ("prompt", "messages", "prompt_token_ids", "continuation", "choices", "answer", "custom_id", "url", "body", "id")


@given(st.dictionaries(st.sampled_from(KEYS), values), st.sampled_from([SCORE, EMBED]))
def test_every_row_becomes_a_job_or_an_error(row: dict[str, Any], task: TaskRows) -> None:
    found = parse(row, task)
    assert isinstance(found, Job) or found.error is not None


BODIES = [
    ({"input": "a"}, None),
    ({"input": ["a"]}, None),
    ({"input": [1, 2]}, None),
    ({"input": [[1, 2]]}, None),
    ({"input": ["a", [1, 2]]}, None),
    ({"input": ["a", 5]}, "`body.input[1]` is 5"),
    ({"input": ["a"] * 2049}, "`body.input` holds 2,049 prompts; allowed: 2,048"),
    ({"input": {}}, "`body.input` is {}"),
    ({}, "`body.input` is not given"),
    ({"input": "a", "encoding_format": "int8"}, '`body.encoding_format` is "int8"'),
    ({"input": "a", "dimensions": "4"}, '`body.dimensions` is "4"'),
    ({"input": "a", "temperature": 1}, "`body.temperature` is not supported"),
    ({"input": "a", "add_special_tokens": True, "embed_dtype": "float32", "priority": 0}, None),
    ({"input": "a", "embed_dtype": "float16"}, '`body.embed_dtype` is "float16", which is not supported'),
    ({"input": "a", "normalize": False}, None),
    ({"input": "a", "use_activation": 1}, "`body.use_activation` is 1"),
    ({"input": "a", "dimension": 4}, "`body.dimension` is not supported; did you mean `dimensions`?"),
]


@pytest.mark.parametrize(("body", "message"), BODIES)
def test_rows_for_the_embeddings_of_openai(body: dict[str, Any], message: str | None) -> None:
    found = parse({"custom_id": "x", "url": "/v1/embeddings", "body": body}, EMBED)
    assert found.context.form is RowForm.OPENAI_EMBEDDING
    if message is None:
        assert isinstance(found, Job)
        assert isinstance(found.task, EmbedTask)
        assert found.task.normalize is body.get("normalize", True)
    else:
        assert isinstance(found, JobResult)
        assert found.error is not None
        assert message in found.error.message


def test_a_key_cannot_be_two_things() -> None:
    settings = {"model": "demo", "task": "score", "score": {"choices_field": "prompt"}}
    with pytest.raises(ConfigError, match=r"the key `prompt` of a row cannot be two things: .*score.choices_field"):
        load_run_config(None, settings=settings)
