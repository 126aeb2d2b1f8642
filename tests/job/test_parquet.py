"""Parquet in and out: rows as in JSONL, and an output that can be continued until it is complete."""

from __future__ import annotations

import json
import math
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from nvcli.core.text_template import TextTemplate
from nvcli.errors import ConfigError
from nvcli.job import file_formats
from nvcli.job.files import check_inputs, check_output
from nvcli.job.input.column_check import ColumnsError
from nvcli.job.input.reader import RowReader
from nvcli.job.job import Job, JobResult
from nvcli.job.output.parquet_output import write_parquet
from nvcli.job.own_files import digests_path, manifest_path
from nvcli.job.rows.native_row import RowKeys
from nvcli.job.rows.parser import RowParser
from nvcli.job.rows.prompt_rules import PromptRules
from output_jobs import extra_of, make_table, open_job, write


def read(path: Path, **options: Any) -> list[Job | JobResult]:
    reader = RowReader([str(path)], RowParser({}, options.pop("keys", None)), **options)
    rows = [row for batch in reader.batches() for row in batch]
    assert reader.bytes_read == reader.bytes_total
    return rows


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


def test_columns_are_keys_and_nulls_are_absent(tmp_path: Path) -> None:
    path = table(
        tmp_path / "in.parquet",
        [
            {"id": "a", "prompt": "p", "messages": None, "sampling": {"top_k": 5, "seed": None}, "x": 1.5},
            {"id": None, "prompt": None, "messages": [{"role": "user", "content": "hi", "name": None}], "x": None},
            {"id": "c", "prompt": None, "messages": None, "x": 2.0},
            {"id": "a", "prompt": "p", "messages": None},
        ],
    )
    rows = read(path)
    assert isinstance(rows[0], Job)
    assert (rows[0].context.id, rows[0].prompt, rows[0].sampling.top_k, extra_of(rows[0])) == ("a", "p", 5, {"x": 1.5})
    assert isinstance(rows[1], Job)
    assert (rows[1].context.id, rows[1].messages) == ("row-1", [{"role": "user", "content": "hi"}])
    errors = [row.error.type for row in rows if isinstance(row, JobResult) and row.error]
    assert errors == ["missing_prompt", "duplicate_id"]


def test_nested_values_may_be_json_text_as_outputs_hold_them(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"model": "m", "prompt": "q"}
    texts = {"sampling": '{"top_k": 5}', "chat_template_kwargs": '{"a": 1}', "messages": json.dumps(messages)}
    texts["tools"] = json.dumps(tools)
    batch = {"custom_id": "b", "url": "/v1/completions", "body": json.dumps(body)}
    none = dict.fromkeys([*texts, *batch, "prompt", "prompt_token_ids"])
    bad = [{"prompt": "p", "sampling": text} for text in ("{5", "5")]
    rows = [{**none, **row} for row in (texts, {"prompt_token_ids": "[5, 6]"}, batch, *bad)]
    talk, ids, other, *failed = read(table(tmp_path / "in.parquet", rows))
    assert isinstance(talk, Job)
    assert (talk.sampling.top_k, talk.chat_template_kwargs, talk.messages) == (5, {"a": 1}, messages)
    assert talk.tools == tools
    assert isinstance(other, Job)
    assert (other.prompt, other.context.model) == ("q", "m")
    assert isinstance(ids, Job)
    assert ids.prompt_token_ids == [5, 6]
    told = [row.error.message for row in failed if isinstance(row, JobResult) and row.error]
    assert '`sampling` is "{5", which is not JSON' in told[0]
    assert told[1] == 'row 5: `sampling` is "5"; expected an object with keys'


def test_other_column_names_and_many_rows(tmp_path: Path) -> None:
    path = table(tmp_path / "in.parquet", [{"question": f"q{i}", "key": i, "prompt": "kept"} for i in range(700)])
    rows = read(path, keys=RowKeys(prompt="question", id="key"))
    assert [row.prompt for row in rows if isinstance(row, Job)] == [f"q{i}" for i in range(700)]
    assert [row.context.id for row in rows] == list(range(700))
    assert extra_of(rows[5]) == {"prompt": "kept"}


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (pyarrow.array([Decimal(7), Decimal(2**60), None], pyarrow.decimal128(38, 0)), [7, 2**60, "row-2"]),
        (pyarrow.array([UUID(int=7).bytes, None, None], pyarrow.uuid()), [str(UUID(int=7)), "row-1", "row-2"]),
        (pyarrow.array([b"a", None, b"c"]), ["a", "row-1", "c"]),
    ],
)
def test_ids_of_databases(tmp_path: Path, ids: pyarrow.Array, expected: list[int | str]) -> None:
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["p"] * 3, "id": ids}), path)
    assert [row.context.id for row in read(path) if isinstance(row, Job)] == expected


def test_maps_of_texts_are_objects_and_bytes_are_texts_where_one_is_needed(tmp_path: Path) -> None:
    """As Spark makes objects, and Hive columns of texts."""
    message = [("role", "user"), ("content", "hi")]
    odd = pyarrow.map_(pyarrow.string(), pyarrow.struct([("x", pyarrow.map_(pyarrow.int8(), pyarrow.int8()))]))
    columns = {
        "messages": pyarrow.array(
            [[message], None, None], pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.string()))
        ),
        "prompt": pyarrow.array([None, b"q", b"\xff"]),
        "odd": pyarrow.array([[("a", {"x": [(1, 2)]})], [("a", None), ("a", None)], None], odd),
    }
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    talk, text, bad = read(path)
    assert isinstance(talk, Job)
    assert (talk.messages, extra_of(talk)) == ([dict(message)], {"odd": {"a": {"x": [[1, 2]]}}})
    assert isinstance(text, Job)
    assert (text.prompt, extra_of(text)) == ("q", {"odd": [["a", None], ["a", None]]})
    assert isinstance(bad, JobResult)
    assert bad.error is not None
    assert "`prompt` is bytes that are not UTF-8 text; allowed: text" in bad.error.message
    template = PromptRules(prompt_template=TextTemplate("<{prompt}>"))
    reader = RowReader([str(path)], RowParser({}, RowKeys(messages="m"), template))
    told = [row.prompt if isinstance(row, Job) else str(row.error) for batch in reader.batches() for row in batch]
    assert told[1] == "<q>"
    assert "`prompt` is not UTF-8 text (invalid start byte); `job.prompt_template` names it" in told[2]


def test_two_columns_of_one_name_are_an_error(tmp_path: Path) -> None:
    """One of them would be left out without a word."""
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"]), path)
    with pytest.raises(ColumnsError, match=r"in\.parquet: two of its columns are called `prompt`; rename one"):
        list(RowReader([str(path)], RowParser({})).batches())


def test_what_is_no_parquet_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    path.write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match=r"in\.parquet: cannot be read: ArrowInvalid"):
        list(RowReader([str(path)], RowParser({})).batches())


def test_moments_that_python_does_not_have_become_texts(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    far, unknown = pyarrow.timestamp("us"), pyarrow.timestamp("us", "Nowhere/Land")
    moments = pyarrow.array(
        [{"at": [253402300800000000]}, {"at": [0]}, None], pyarrow.struct([("at", pyarrow.list_(far))])
    )
    columns = {
        "days": pyarrow.array([(1 << 31) - 1, 0, None], pyarrow.date32()),
        "moments": moments,
        "zoned": pyarrow.array([1, None, 0], unknown),
    }
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["p", "q", "r"], **columns}), path)
    assert [extra_of(row) for row in read(path)] == [
        {
            "days": "<value out of range: 2147483647>",
            "moments": {"at": ["10000-01-01 00:00:00.000000"]},
            "zoned": "1970-01-01T00:00:00.000001Z",
        },
        {"days": "1970-01-01", "moments": {"at": ["1970-01-01T00:00:00"]}},
        {"zoned": "1970-01-01T00:00:00Z"},
    ]


@pytest.mark.parametrize("advice", ["pip install pyarrow", r"pip install -U pyarrow numpy"])
def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advice: str) -> None:
    monkeypatch.setattr(file_formats, "find_spec", lambda name: object() if "-U" in advice else None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # its import raises
    path = tmp_path / "in.parquet"
    path.touch()
    for check in (lambda: check_inputs([str(path)]), lambda: check_output([], str(tmp_path / "out.parquet"))):
        with pytest.raises(ConfigError, match=advice):
            check()


def test_an_output_is_written_at_the_end_and_can_be_continued_until_then(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    write(path, range(4), failing=())
    assert not path.exists()
    assert (tmp_path / "out.parquet.rows.jsonl").exists()
    output = write(path, range(9), failing=(), finish=True)
    assert output.answered.all.count == 4
    assert set(tmp_path.iterdir()) == {path, digests_path(path), manifest_path(path)}
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert [row["index"] for row in rows] == list(range(9))
    assert rows[3]["choices"][0]["text"] == "ünswer 3\n"
    usage = {"prompt_tokens": 3, "completion_tokens": 0, "cached_tokens": 0}
    assert rows[3]["usage"] == {**usage, "reasoning_tokens": None}
    assert rows[3]["error"] is None
    again = open_job(path)
    assert again.finished is not None
    again.close()
    assert set(tmp_path.iterdir()) == {path, digests_path(path), manifest_path(path)}


def test_failed_rows_can_be_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    write(path, range(9), finish=True)
    errors = [row["error"] for row in pyarrow.parquet.read_table(path).to_pylist() if row["error"]]
    assert [error["type"] for error in errors] == ["prompt_too_long"] * 2
    write(path, range(9), failing=(), finish=True, retry_errors=True)
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert sorted(row["index"] for row in rows) == list(range(9))
    assert all(row["error"] is None for row in rows)


def test_an_output_keeps_its_mode_and_its_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    table, link = tmp_path / "there" / "real.parquet", tmp_path / "out.parquet"
    link.symlink_to(table)
    write(link, range(3), finish=True)  # the link leads to nothing yet
    table.chmod(0o640)
    write(link, range(3), failing=(), finish=True, retry_errors=True)
    assert (link.is_symlink(), table.stat().st_mode & 0o777) == (True, 0o640)
    table.chmod(0o600)
    write(link, range(2), failing=(), overwrite=True)
    working = tmp_path / "out.parquet.rows.jsonl"
    assert (working.stat().st_mode & 0o777, table.stat().st_size) == (0o600, 0)
    write(link, range(3), failing=(), finish=True)
    assert (link.is_symlink(), table.stat().st_mode & 0o777) == (True, 0o600)
    assert pyarrow.parquet.read_table(table).num_rows == 3
    assert [entry.name for entry in table.parent.iterdir()] == ["real.parquet"]


def test_a_link_to_a_folder_that_takes_no_table_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "out.parquet").symlink_to(tmp_path / "gone" / "real.parquet")
    with pytest.raises(ConfigError, match=r"out\.parquet leads to .*gone, which cannot be written to: No such"):
        check_output([], str(tmp_path / "out.parquet"))


def test_an_existing_table_of_another_origin_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "out.parquet", [{"a": 1}])
    with pytest.raises(ConfigError, match="--overwrite"):
        open_job(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.parquet"]


def test_types_of_columns(tmp_path: Path) -> None:
    own = {"index": 0, "choices": [], "usage": {}, "error": None}
    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0, "b": -2.0}]}
    choice = {"index": 0, "text": "a", "finish_reason": "stop", "token_ids": [4], "logprobs": logprobs}
    rows = [
        {"id": "x", **own, "number": 1, "mixed": 1, "nested": {"a": [1]}, "big": 1 << 70, "none": None, "flag": True},
        {"id": 7, **own, "choices": [choice], "number": 1.5, "mixed": "t", "late": "l"},
    ]
    path = tmp_path / "out.parquet"
    make_table(write_parquet, lambda: map(msgspec.json.encode, rows), path)
    first, second = pyarrow.parquet.read_table(path).to_pylist()
    assert (first["id"], second["id"]) == ("x", "7")
    assert (first["number"], first["mixed"], first["nested"], first["flag"]) == (1.0, "1", '{"a":[1]}', True)
    assert (second["mixed"], second["late"], second["nested"], second["none"]) == ("t", "l", None, None)
    assert math.isclose(float(first["big"]), float(1 << 70))
    assert second["choices"][0]["logprobs"]["top_logprobs"] == [
        [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -2.0}]
    ]


def test_integers_that_no_float_holds_stay_exact(tmp_path: Path) -> None:
    own = {"id": "x", "index": 0, "choices": [], "usage": {}, "error": None}
    large = (1 << 60) + 1
    rows = [{**own, "alone": large, "small": 1, "floats": large}, {**own, "alone": 5, "small": 1.5, "floats": 1.5}]
    path = tmp_path / "out.parquet"
    make_table(write_parquet, lambda: map(msgspec.json.encode, rows), path)
    columns = pyarrow.parquet.read_table(path, columns=["alone", "small", "floats"]).to_pydict()
    assert columns == {"alone": [large, 5], "small": [1.0, 1.5], "floats": [str(large), "1.5"]}


def test_an_output_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    write(path, [], finish=True)
    assert pyarrow.parquet.read_table(path).num_rows == 0


def test_rows_in_openai_form(tmp_path: Path) -> None:
    row = {"id": "batch_req_0", "custom_id": "a", "response": {"status_code": 200}, "error": None}
    path = tmp_path / "out.parquet"
    make_table(write_parquet, lambda: [msgspec.json.encode(row)], path)
    (read_back,) = pyarrow.parquet.read_table(path).to_pylist()
    assert read_back == {"id": "batch_req_0", "custom_id": "a", "response": '{"status_code":200}', "error": None}
