"""An input whose prompts stand in another column is refused before its rows become errors."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nvcli.core.text_template import TextTemplate
from nvcli.job.input.column_check import MAX_HELD_ROWS, ColumnsError
from nvcli.job.input.reader import RowReader, first_rows
from nvcli.job.job import Job, JobResult
from nvcli.job.row_set import AnsweredRows
from nvcli.job.rows.native_row import RowKeys
from nvcli.job.rows.parser import RowParser
from nvcli.job.rows.prompt_rules import PromptRules

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
    with pytest.raises(ColumnsError, match="--prompt-field answer\n"):  # not the usual name, but the nearest
        read(path, RowParser({}, RowKeys(prompt="Answers")))


def test_rows_of_jsonl_in_a_file_of_text(tmp_path: Path) -> None:
    rows = file_of(tmp_path / "in.jsonl.txt", [GOOD, GOOD])
    with pytest.raises(
        ColumnsError,
        match=r"all of its first 2 rows have JSON .*\n  name it so: mv \S*in.jsonl.txt \S*in.jsonl\n  or send",
    ):
        read(rows)
    assert len(read(file_of(tmp_path / "other.txt", [OTHER, OTHER]))) == 2
    (tmp_path / "in.txt").write_text('{"prompt": "p"}\n{as text}\n')
    assert len(read(tmp_path / "in.txt")) == 2


@pytest.mark.parametrize("bad_ids", [[5, 5], [1.5, 5, 6], [1.5, 5, 5]])
def test_ids_that_cannot_be_used_hide_no_other_fault(tmp_path: Path, bad_ids: list[float]) -> None:
    rows = [{"id": own_id, **OTHER} for own_id in bad_ids]
    path = file_of(tmp_path / "in.jsonl", rows)
    with pytest.raises(ColumnsError, match=rf"none of its first {len(rows)} rows has a prompt"):
        read(path)
    assert len(read(file_of(tmp_path / "good.jsonl", [*rows, GOOD]))) == len(rows) + 1
    assert len(read(file_of(tmp_path / "alike.jsonl", [{"id": 1.5}] * 2))) == 2
    prompts = [{"id": own_id, **GOOD} for own_id in bad_ids]
    assert len(read(file_of(tmp_path / "prompts.jsonl", [*prompts, OTHER]))) == len(rows) + 1


@pytest.mark.parametrize(
    "rows", [[OTHER] * (MAX_HELD_ROWS - 1) + [GOOD] + [OTHER] * 300, [{"prompt": 5}, OTHER], [GOOD, OTHER], []]
)
def test_rows_without_a_prompt_among_others_are_error_rows(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    found = read(file_of(tmp_path / "in.jsonl", rows))
    assert [row.context.index for row in found] == list(range(len(rows)))
    assert [isinstance(row, Job) for row in found] == [row is GOOD for row in rows]


BOTH = {"prompt": "p", "messages": [{"role": "user", "content": "m"}]}
CHAT = {"messages": [{"role": "user", "content": "m"}]}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (
            [BOTH] * 3,
            "all of its first 3 rows have more than one prompt, .* are given; give one of them\n.*: "
            "--messages-field messages\n.*: --messages-field none\n",
        ),
        ([CHAT], r"its only row has a conversation \(`messages`\), and the model has no .*\n.*: --chat-template FILE"),
        (
            [{"custom_id": f"c{n}", "url": "/v1/chat/completions", "body": CHAT} for n in range(150)],
            r"all of its first 100 rows have a conversation \(`body.messages`\)",
        ),
        (
            [{"custom_id": f"c{n}", "url": "/v1/completions", "body": CHAT} for n in range(2)],
            "none of its first 2 rows has a prompt: line 1: .*; the `url` for it is /v1/chat/.*\n  mend the rows",
        ),
    ],
)
def test_other_faults_that_all_rows_share(tmp_path: Path, rows: list[dict[str, Any]], told: str) -> None:
    path = file_of(tmp_path / "in.jsonl", rows)
    rules = PromptRules(has_chat_template=False)
    with pytest.raises(ColumnsError, match=rf"in\.jsonl: {told}"):
        read(path, RowParser({}, rules=rules))
    among_others = file_of(tmp_path / "others.jsonl", [*rows, GOOD][-50:])
    assert len(read(among_others, RowParser({}, rules=rules))) == min(50, len(rows) + 1)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"}\n'.encode("utf-16"), "none of its first 3 lines is JSON: it is UTF-16 text"),
        ('{"prompt": "a"}\n'.encode("utf-16-le"), "it is UTF-16 text\n  convert it: iconv -f UTF-16"),
        ('{"prompt": "a"}\n'.encode("utf-16-be"), "it is UTF-16 text"),
        ('{"prompt": "a"}\n'.encode("utf-32"), "it is UTF-32 text"),
        (random.Random(5).randbytes(10_000), "it is binary data"),
    ],
)
def test_what_is_no_text(tmp_path: Path, data: bytes, told: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    with pytest.raises(ColumnsError, match=told):
        read(path)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (
            b'[{"prompt": "a"},\n {"prompt": "b"}]\n',
            r"it is a JSON array\n  name it so: mv \S*in.jsonl \S*in.json\n  or make",
        ),
        (b'[\r\n{"prompt": "a"},\r\n{"prompt": "b"}\r\n]\r\n', "first 4 lines is JSON: it is a JSON array"),
        (b'{\n  "prompt": "a"\n}\n', r"its objects go over several lines\n  .*: jq -c \.\n"),
        (b"What is 3 + 4?\nAnd 5 + 6?\n", r"it is text\n  name it so, if each line is a prompt .*: mv \S* \S*in.txt\n"),
    ],
)
def test_other_forms_of_text_are_named(tmp_path: Path, data: bytes, told: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    with pytest.raises(ColumnsError, match=told):
        read(path)


@pytest.mark.parametrize(
    "data",
    [
        b"{\n" * 150,
        b'{"prompt": "caf\xe9"}\n',
        b'{"prompt": "\0"}\n{"prompt": 1}\n',
        b'[\n{"prompt": "a"}\n{"prompt": "b"}\n',
    ],
)
def test_bad_lines_of_text_are_error_rows(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    assert len(read(path)) == data.count(b"\n")


@pytest.mark.parametrize(
    ("keys", "has_messages", "copied"),
    [
        (RowKeys(deciding="messages"), True, ["prompt"]),
        (RowKeys(prompt="q", deciding="q"), False, ["prompt", "messages"]),
        (RowKeys(messages="none", deciding="none"), False, ["q", "messages"]),
    ],
)
def test_a_key_that_is_named_decides(tmp_path: Path, keys: RowKeys, has_messages: bool, copied: list[str]) -> None:
    row = {"prompt": "p", **({"q": "q"} if "q" in (keys.prompt, *copied) else {}), "messages": CHAT["messages"]}
    (job,) = read(file_of(tmp_path / "in.jsonl", [row]), RowParser({}, keys))
    assert isinstance(job, Job)
    assert (job.messages is not None) is has_messages
    assert sorted(job.context.extra) == sorted(copied)


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
        (["inputs", "parameters"], "--prompt-field inputs"),
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

    def look(files: list[Path], keys: RowKeys | None = None) -> None:
        for file in files:
            first_rows(RowReader([str(file)], RowParser({}, keys), check_columns=True))

    look([good, broken])
    with pytest.raises(ColumnsError, match=r"b\.jsonl"):
        look([good, bad])
    look([good, bad], RowKeys(prompt="question", messages="prompt"))


def test_options_become_settings_for_commands_without_them(tmp_path: Path) -> None:
    with pytest.raises(ColumnsError) as error:
        read(file_of(tmp_path / "in.jsonl", [{"col": 1}]))
    assert (
        "with --set job.prompt_field or --set job.messages_field, or columns with --set job.prompt_template\n"
        in str(error.value.in_settings())
    )
