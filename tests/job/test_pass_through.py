"""What is passed through comes out as it went in, byte for byte, and takes no more memory than its bytes."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvcli.core.text_template import TextTemplate
from nvcli.job.input import table_source
from nvcli.job.input.reader import RowReader
from nvcli.job.job import Job, JobResult
from nvcli.job.output import parquet_output
from nvcli.job.output.parquet_output import write_parquet
from nvcli.job.row_set import AnsweredRows
from nvcli.job.rows.native_row import RowKeys
from nvcli.job.rows.output_row import OutputForm, output_row
from nvcli.job.rows.parser import RowParser
from nvcli.job.rows.prompt_rules import PromptRules
from nvcli.job.rows.raw_values import is_deeper
from output_jobs import make_table

ReadRows = Callable[..., list[Job | JobResult]]
"""The fixture of conftest.py."""


def test_values_are_copied_byte_for_byte(read_rows: ReadRows) -> None:
    values = rb'"n":1.10,"large":123456789012345678901234567890,"huge":-1e999,"t":"\u00fc\/","o":{ "a" :[ 1 ,null]}'
    for own in (b'"prompt":"p"', b'"prompt":1', b'"custom_id":"a","url":"u","body":{}'):
        (row,) = read_rows(b"{" + values + b"," + own + b"}")
        result = row if isinstance(row, JobResult) else JobResult(context=row.context)
        assert values in msgspec.json.encode(output_row(result, OutputForm()))


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        (
            b'{"prompt":"p","index":7,"error":null,"choices":[ 1.0],"usage":1e999,"topic":"t"}',
            {"topic": b'"t"', "input": b'{"index":7,"error":null,"choices":[ 1.0],"usage":1e999}'},
        ),
        (b'{"prompt":"p","input":[1.0],"topic":2}', {"topic": b"2", "input": b"[1.0]"}),
        (b'{"prompt":"p","input":"i","index":null}', {"input": b'{"input":"i","index":null}'}),
        (
            b'{"custom_id":"a","url":"/v1/completions","body":{"prompt":"p"},"id":1,"index":2,"response":3,"usage":4}',
            {"usage": b"4", "input": b'{"id":1,"index":2,"response":3}'},
        ),
    ],
)
def test_keys_with_the_names_of_output_keys_go_under_input(
    read_rows: ReadRows, row: bytes, kept: dict[str, bytes]
) -> None:
    """They were dropped."""
    (read,) = read_rows(row)
    written = output_row(JobResult(context=read.context), OutputForm())
    without = output_row(JobResult(context=msgspec.structs.replace(read.context, extra={})), OutputForm())
    found = {key: msgspec.json.encode(value) for key, value in written.items() if key not in without}
    assert found == kept
    assert {key: value for key, value in written.items() if key in without} == without


def test_nan_and_infinity_are_null(tmp_path: Path) -> None:
    """Python's `json` writes them. As values of nvcli's own keys they are gaps, as in tables of pandas."""
    own = {"id": float("nan"), "prompt": "p", "messages": float("nan"), "sampling": float("nan")}
    copied = {"m": float("nan"), "o": {"NaN": [1.5, float("inf"), -float("inf")]}, "t": '":NaN,', "big": 1}
    lines = tmp_path / "in.jsonl"
    good = json.dumps({"prompt": "q", "m": 1.5, "t": "NaN"})
    lines.write_text(f"{json.dumps({**own, **copied})}\n{good}\n".replace('"big": 1}', '"big": 1e999999}'))
    table = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{**own, **copied}, json.loads(good)]), table)
    for source, place in ((lines, "line 1"), (table, "row 1")):
        parser = RowParser({})
        first, second = (row for batch in RowReader([str(source)], parser).batches() for row in batch)
        assert isinstance(first, Job)
        assert (first.context.id, first.prompt, first.messages) == ("row-0", "p", None)
        values = {key: json.loads(bytes(value)) for key, value in first.context.extra.items()}
        big = values.pop("big")
        assert big == (float("inf") if source == lines else 1)  # a number of any size is JSON
        assert values == {"m": None, "o": {"NaN": [1.5, None, None]}, "t": '":NaN,'}
        assert json.loads(bytes(second.context.extra["m"])) == 1.5
        (warning,) = parser.warnings.take_new()
        assert warning.startswith(f"warning: {place} has NaN or Infinity, which JSON does not have")
        assert parser.warnings.totals() == ["NaN or Infinity became null in 1 row"]


def test_a_template_does_not_fill_in_nan(tmp_path: Path) -> None:
    rows = [{"a": "x", "n": float("nan")}, {"a": "x", "n": 1.5}]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    for name in ("in.jsonl", "in.parquet"):
        parser = RowParser({}, rules=PromptRules(prompt_template=TextTemplate("{a} {n}")))
        first, second = (row for batch in RowReader([str(tmp_path / name)], parser).batches() for row in batch)
        assert isinstance(first, JobResult)
        assert first.error is not None
        assert first.error.type == "missing_column"
        assert isinstance(second, Job)
        assert second.prompt == "x 1.5"


NULLS = [
    {"id": None, "prompt": "p", "messages": None, "sampling": None, "chat_template_kwargs": None, "topic": "t"},
    {"prompt": "p", "custom_id": None, "url": "u", "body": "b"},
    {"custom_id": "c", "url": "/v1/completions", "method": None, "body": {"prompt": "p"}, "prompt": None},
    {"custom_id": None, "url": "/v1/completions", "body": {"prompt": "p"}},
    {"id": None, "prompt": None},
]


def test_null_means_the_same_in_every_format(tmp_path: Path) -> None:
    """A null id was an error in JSONL, and none in Parquet."""
    texts, table = tmp_path / "in.jsonl", tmp_path / "in.parquet"
    texts.write_bytes(b"\n".join(msgspec.json.encode(row) for row in NULLS))
    columns = {key: None for row in NULLS for key in row}
    tables = [pyarrow.Table.from_pylist([{**columns, **row}]) for row in NULLS]
    for number, row in enumerate(tables):
        pyarrow.parquet.write_table(row, f"{table}{number}.parquet")
    sources = [[str(texts)], [f"{table}{number}.parquet" for number in range(len(NULLS))]]
    lines, rows = ([row for batch in RowReader(names, RowParser({})).batches() for row in batch] for names in sources)
    for line, row in zip(lines, rows, strict=True):
        assert type(line) is type(row)
        assert (line.context.id, line.context.form) == (row.context.id, row.context.form)
        if isinstance(line, Job) and isinstance(row, Job):
            assert (line.prompt, line.sampling) == (row.prompt, row.sampling)
        elif isinstance(line, JobResult) and isinstance(row, JobResult):
            assert line.error is not None
            assert row.error is not None
            assert line.error.type == row.error.type
    assert [row.context.id for row in lines] == ["row-0", "row-1", "c", "row-3", "row-4"]
    assert [isinstance(row, Job) for row in lines] == [True, True, True, False, False]
    assert rows[4].context.line == f"row 1 of {table}4.parquet"


def test_what_is_passed_through_makes_no_objects() -> None:
    line = b'{"prompt":"p","kept":[' + b"{}," * 1_000_000 + b"{}]}"
    parser = RowParser({})
    parser.parse(b"[" * 401 + b"]" * 401, index=0, where="")  # imports numpy
    tracemalloc.start()
    row = parser.parse(line, index=1, where="")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(row, Job)
    assert peak < 6 * len(line)


def test_a_small_value_does_not_keep_its_line_in_memory(read_rows: ReadRows) -> None:
    tracemalloc.start()
    rows = [read_rows(b'{"prompt":1,"text":"x","messages":"' + b"x" * 1_000_000 + b'"}') for _ in range(5)]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == 5
    assert held < 1_000_000


def test_nested_values_become_json_text_in_a_table(tmp_path: Path) -> None:
    own = b'"index":0,"choices":[],"usage":{},"error":null'
    rows = [
        b'{"id":"a",' + own + b',"x":{ "a":1.50},"mixed":1.50,"huge":1e999}',
        b'{"id":"b",' + own + b',"mixed":"t"}',
    ]
    make_table(write_parquet, lambda: rows, tmp_path / "out.parquet")
    first, second = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert (first["x"], first["mixed"], first["huge"]) == ('{ "a":1.50}', "1.50", "1e999")
    assert (second["x"], second["mixed"]) == (None, "t")


def test_batches_of_tables_are_bounded_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "p" * 1000, "same": "s" * 1000} for _ in range(50)]
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    monkeypatch.setattr(table_source, "_BATCH_BYTES", 10_000)
    (batch,) = pyarrow.Table.from_pylist(rows).to_batches()
    sizes = [len(part) for part, _ in table_source.rows_of(batch)]
    assert sum(sizes) == 50
    assert max(sizes) <= 5
    read = [row for batch in RowReader([str(path)], RowParser({})).batches() for row in batch]
    assert len(read) == 50
    monkeypatch.setattr(parquet_output, "_BATCH_BYTES", 10_000)
    lines = [msgspec.json.encode(row) for row in rows]
    make_table(write_parquet, lambda: lines, path)
    assert pyarrow.parquet.read_metadata(path).num_row_groups == 10
    assert pyarrow.parquet.read_table(path).to_pylist() == rows


JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='[]{}"\\/aü', max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='[{"\\', max_size=3), inner, max_size=3)
    ),
)


@given(JSON, st.booleans())
def test_nesting_is_told_from_the_text(value: object, escaped: bool) -> None:
    def depth(value: object) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    text = json.dumps(value, ensure_ascii=escaped).encode()
    assert [is_deeper(text, levels) for levels in range(5)] == [depth(value) > levels for levels in range(5)]


KEYS = ("id", "custom_id", "prompt", "url", "body", "key")


def spelled(key: str, escapes: int) -> str:
    """A key as JSON with some of its characters escaped."""
    return '"' + "".join(f"\\u{ord(c):04x}" if escapes >> at & 1 else c for at, c in enumerate(key)) + '"'


ROWS = st.lists(
    st.builds(
        lambda keys: "{" + ",".join(f"{spelled(key, escapes)}:{value}" for key, escapes, value in keys) + "}",
        st.lists(
            st.tuples(st.sampled_from(KEYS), st.integers(0, 511), st.sampled_from(['"a"', '"b"', "1", "2", "null"])),
            max_size=4,
        ).map(lambda keys: [*keys, ("prompt", 0, '"p"')]),
    ),
    max_size=8,
)


@given(ROWS, st.sets(st.integers(0, 7)), st.sampled_from(["id", "key", "custom_id"]))
def test_duplicates_are_the_same_after_a_resume_however_keys_are_escaped(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], answered: set[int], id_key: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "in.jsonl"
    path.write_text("\n".join(lines))

    def read(done: AnsweredRows | None) -> list[Job | JobResult]:
        reader = RowReader([str(path)], RowParser({}, RowKeys(id=id_key)), answered=done)
        return [row for batch in reader.batches() for row in batch]

    whole, done = read(None), AnsweredRows()
    for row in whole:
        if row.context.index in answered:
            done.all.add(row.context.index)
            if isinstance(row, JobResult):
                done.failed.add(row.context.index)
    assert read(done) == [row for row in whole if row.context.index not in answered]


def test_a_passed_through_id_is_no_id_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id":"a","prompt":"p"}\n{"custom_id":"a","prompt":"p"}')
    done = AnsweredRows()
    done.all.add(0)
    ((row,),) = RowReader([str(path)], RowParser({}, RowKeys(id="custom_id")), answered=done).batches()
    assert isinstance(row, Job)


def test_keys_that_json_escapes_may_hold_prompts_and_ids(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode({'a "text"': "p", "no.\n1": id_}) + b"\n" for id_ in "aba"))
    done = AnsweredRows()
    done.all.add(0)
    keys = RowKeys(prompt='a "text"', id="no.\n1")
    rows = [row for batch in RowReader([str(path)], RowParser({}, keys), answered=done).batches() for row in batch]
    assert [(row.context.id, type(row)) for row in rows] == [("b", Job), ("a", JobResult)]


def test_an_escaped_custom_id_is_an_id_after_a_resume(tmp_path: Path) -> None:
    body = '"url":"/v1/completions","body":{"prompt":"p"}}'
    path = tmp_path / "in.jsonl"
    path.write_text('{"custom\\u005fid":"a",' + body + '\n{"custom_id":"a",' + body)
    done = AnsweredRows()
    done.all.add(0)
    ((row,),) = RowReader([str(path)], RowParser({}), answered=done).batches()
    assert isinstance(row, JobResult)
    assert row.error is not None
    assert row.error.type == "duplicate_id"
