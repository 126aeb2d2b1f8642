"""An input whose prompts stand in another column is refused before its rows become errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nvcli.jobs.input.column_check import MAX_HELD_ROWS, ColumnsError
from nvcli.jobs.input.reader import RowReader, check_first_rows
from nvcli.jobs.job import Job, JobResult
from nvcli.jobs.row_set import AnsweredRows
from nvcli.jobs.rows.native_row import RowKeys
from nvcli.jobs.rows.parser import RowParser
from nvcli.jobs.rows.prompt_rules import PromptRules
from nvcli.text_template import TextTemplate

OTHER = {"idx": 1, "question": "q", "answer": "a"}
GOOD = {"prompt": "p"}


def file_of(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, parser: RowParser | None = None, **options: Any) -> list[Job | JobResult]:
    reader = RowReader([str(path)], parser or RowParser({}), check_columns=True, **options)
    return [row for batch in reader.batches() for row in batch]


@pytest.mark.parametrize("rows", [[OTHER], [OTHER] * 7, [OTHER] * MAX_HELD_ROWS + [GOOD]])
def test_no_prompt_at_the_beginning(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = file_of(tmp_path / "in.jsonl", rows)
    with pytest.raises(ColumnsError) as error:
        read(path)
    message = str(error.value)
    assert "its columns are `idx`, `question`, `answer`" in message
    assert "a prompt is read from `prompt`, `messages`, `prompt_token_ids`" in message
    assert "--prompt-field question\n" in message
    which = (
        "its only row has no prompt" if len(rows) == 1 else f"none of its first {min(len(rows), 100)} rows has a prompt"
    )
    assert f"in.jsonl: {which}: " in message


@pytest.mark.parametrize(
    "rows", [[OTHER] * (MAX_HELD_ROWS - 1) + [GOOD] + [OTHER] * 300, [{"prompt": 5}, OTHER], [GOOD, OTHER], []]
)
def test_rows_without_a_prompt_among_others_are_error_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    found = read(file_of(tmp_path / "in.jsonl", rows))
    assert [row.place.index for row in found] == list(range(len(rows)))
    assert [isinstance(row, Job) for row in found] == [row is GOOD for row in rows]


def test_a_limit_bounds_what_is_looked_at(tmp_path: Path) -> None:
    path = file_of(tmp_path / "in.jsonl", [OTHER, OTHER, GOOD])
    with pytest.raises(ColumnsError, match="none of its first 2 rows"):
        read(path, limit=2)
    assert len(read(path, limit=3)) == 3


def test_a_job_that_is_continued_has_the_right_columns(tmp_path: Path) -> None:
    path = file_of(tmp_path / "in.jsonl", [GOOD, OTHER, OTHER])
    done = AnsweredRows()
    done.all.add(0)
    assert len(read(path, answered=done)) == 2


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        (["a", "Conversations", "text"], "--messages-field Conversations"),
        (["answer", "text", "User Prompt", "instruction"], "--prompt-field instruction"),
        (["Prompt", "b"], "--prompt-field Prompt"),
        (["x y", "z"], "with --prompt-field or --messages-field, or columns with --prompt-template"),
        (["id", "sampling"], "it has no columns beside `id` and `sampling`"),
        ([f"c{number}" for number in range(20)], "`c11` and 8 more"),
    ],
)
def test_the_likely_column_is_named(tmp_path: Path, columns: list[str], told: str) -> None:
    path = file_of(tmp_path / "in.jsonl", [{column: {} if column == "sampling" else "v" for column in columns}])
    with pytest.raises(ColumnsError) as error:
        read(path)
    assert told in str(error.value)


def test_a_template_over_other_columns(tmp_path: Path) -> None:
    path = file_of(tmp_path / "in.jsonl", [OTHER])
    rules = PromptRules(prompt_template=TextTemplate("{text}: {question}"))
    with pytest.raises(ColumnsError, match=r"the template reads `question`, `text`\n  name columns of the input"):
        read(path, RowParser({}, rules=rules))


def test_each_input_is_looked_at_and_other_trouble_is_left_alone(tmp_path: Path) -> None:
    good, bad = file_of(tmp_path / "a.jsonl", [GOOD]), file_of(tmp_path / "b.jsonl", [OTHER])
    broken = tmp_path / "c.json"
    broken.write_text('[{"question": 1}')
    check_first_rows([str(good), str(broken)], lambda: RowParser({}))
    with pytest.raises(ColumnsError, match=r"b\.jsonl"):
        check_first_rows([str(good), str(bad)], lambda: RowParser({}))
    check_first_rows([str(good), str(bad)], lambda: RowParser({}, RowKeys(prompt="question", messages="prompt")))
