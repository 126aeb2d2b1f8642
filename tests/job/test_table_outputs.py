"""CSV and TSV outputs: made of all rows at the end, and continued until then; texts of answers in their own column."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nvcli.core.config import RESERVED_KEYS, load_run_config
from nvcli.errors import ConfigError
from nvcli.job.input.reader import RowReader
from nvcli.job.job import Choice, Job, JobResult, RowForm
from nvcli.job.output.table import write_csv
from nvcli.job.own_files import digests_path, manifest_path, rows_path
from nvcli.job.rows.native_row import RowKeys
from nvcli.job.rows.output_row import OutputForm, output_row
from nvcli.job.rows.parser import RowParser
from output_jobs import extra_of, make_table, open_job, plain_bytes, result_of, write


def records(path: Path, *, delimiter: str = ",") -> list[dict[str, str]]:
    """The rows of a CSV file by column, read by Python's own reader."""
    text = plain_bytes(path).decode()
    return list(csv.DictReader(text.splitlines(keepends=True), delimiter=delimiter, strict=True))


@pytest.mark.parametrize("name", ["out.csv", "out.tsv", "out.csv.gz", "out.TSV.ZST"])
def test_an_output_is_written_at_the_end_and_can_be_continued_until_then(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write(path, range(4))
    assert not path.exists()
    output = write(path, range(9), finish=True, order="input")
    assert output.answered.all.count == 4
    kept = {path, digests_path(path), manifest_path(path)}
    assert set(tmp_path.iterdir()) == {*kept, rows_path(path)}  # which --retry-errors needs
    rows = records(path, delimiter="\t" if ".tsv" in name.lower() else ",")
    assert [int(row["index"]) for row in rows] == list(range(9))
    assert rows[2]["generated_text"] == "ünswer 2\n"
    assert json.loads(rows[2]["usage"])["prompt_tokens"] == 2
    assert json.loads(rows[2]["choices"])[0]["finish_reason"] == "stop"
    assert (rows[3]["generated_text"], json.loads(rows[3]["error"])["type"]) == ("", "prompt_too_long")
    write(path, range(9), failing=(), finish=True, retry_errors=True)
    assert set(tmp_path.iterdir()) == kept
    again = open_job(path)
    assert again.finished is not None
    again.close()


def test_cells_of_all_kinds(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "a", "x": 1.5, "flag": True, "list": [1, "b"], "text": 'a "quote", a\rreturn'},
        {"id": 7, "x": None, "text": "a\rb", "late, with a comma": "\nl"},
    ]
    path = tmp_path / "out.csv"
    assert make_table(write_csv, lambda: map(msgspec.json.encode, rows), path, name=path.name) == 2
    lines = (
        'id,x,flag,list,text,"late, with a comma"',
        'a,1.5,true,"[1,""b""]","a ""quote"", a\rreturn",',
        '7,,,,"a\rb","\nl"',
    )
    assert path.read_bytes().decode() == "".join(f"{line}\n" for line in lines)
    read = [row for batch in RowReader([str(path)], RowParser({}, RowKeys(prompt="text"))).batches() for row in batch]
    assert [row.prompt for row in read if isinstance(row, Job)] == ['a "quote", a\rreturn', "a\rb"]


def test_large_tables_are_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvcli.job.output.table._CHUNK_BYTES", 100)
    path = tmp_path / "out.csv.gz"
    rows = [{"id": number, "text": "t" * 50} for number in range(20)]
    make_table(write_csv, lambda: map(msgspec.json.encode, rows), path, name=path.name)
    assert path.read_bytes().count(b"\x1f\x8b\x08\0\0\0\0\0") >= 7
    assert [row["id"] for row in records(path)] == list(map(str, range(20)))


def test_an_output_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write(path, [], finish=True)
    assert path.read_text() == "id,index,choices,usage,error\n"


@pytest.mark.parametrize("form", [RowForm.NATIVE, RowForm.CHAT, RowForm.COMPLETION])
def test_the_text_of_the_first_choice(form: RowForm) -> None:
    result = result_of(1, form=form)
    second = Choice(index=1, text="other", finish_reason="stop")
    extra = {"answer": msgspec.Raw(b'"gold"'), "x": msgspec.Raw(b"1")}
    context = msgspec.structs.replace(result.context, extra=extra)
    result = msgspec.structs.replace(result, context=context, choices=[*result.choices, second])
    row = output_row(result, OutputForm(text_field="answer"))
    assert row["answer"] == "ünswer 1\n"
    assert row["input"] == {"answer": extra["answer"]}
    assert row["x"] == extra["x"]
    assert output_row(JobResult(context=context), OutputForm(text_field="answer"))["answer"] is None


@pytest.mark.parametrize("key", RESERVED_KEYS)
def test_a_text_cannot_have_the_name_of_another_key(key: str) -> None:
    with pytest.raises(ConfigError, match=f"--text-field {key}: .*which is a key of output rows; choose a name"):
        load_run_config(None, flags={"--model": "demo", "--text-field": key})


def test_all_of_a_row_can_be_kept(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    native = {"key": "a", "prompt": "p", "sampling": {"n": 1}, "index": 5, "id": "x", "y": 2}
    batch = {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": "q"}}
    path.write_text(json.dumps(native) + "\n" + json.dumps(batch) + '\n{"key": 5}\n')
    parser = RowParser({}, RowKeys(id="key"), keep_input=True)
    rows = [row for rows in RowReader([str(path)], parser).batches() for row in rows]
    results = [row if isinstance(row, JobResult) else JobResult(context=row.context) for row in rows]
    first, second, third = (json.loads(msgspec.json.encode(output_row(row, OutputForm()))) for row in results)
    assert (first["id"], first["index"], first["input"]) == ("a", 0, {"index": 5, "id": "x"})
    assert {key: first[key] for key in native if key not in ("index", "id")} == {
        key: native[key] for key in native if key not in ("index", "id")
    }
    assert {key: second[key] for key in batch} == batch
    assert "input" not in second
    assert (third["key"], third["error"]["type"]) == (5, "missing_prompt")
    parser = RowParser({}, keep_input=True)
    path.write_text('{"id": "a", "prompt": "p"}\n')
    ((row,),) = RowReader([str(path)], parser).batches()
    assert extra_of(row) == {"prompt": "p"}
    assert parser.warnings.totals() == []
