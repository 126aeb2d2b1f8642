"""A JSON array gives its items byte for byte, however the file is cut into chunks."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvcli.core.text_template import TextTemplate
from nvcli.errors import ConfigError
from nvcli.job import compression, line_splitter
from nvcli.job.input.column_check import ColumnsError
from nvcli.job.input.json_source import ArraySplitter, JsonSplitter
from nvcli.job.input.line_source import DamagedInput
from nvcli.job.input.reader import RowReader
from nvcli.job.job import Job, JobResult
from nvcli.job.line_splitter import DroppedLine, Line
from nvcli.job.rows.native_row import RowKeys
from nvcli.job.rows.parser import RowParser
from nvcli.job.rows.prompt_rules import PromptRules
from output_jobs import extra_of

VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text(alphabet='[]{}",\\/aü\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='[{"\\,', max_size=3), inner, max_size=3)
    ),
)


def items(data: bytes, rng: random.Random) -> list[Line]:
    """The items, with the file cut at random places."""
    splitter, found = JsonSplitter(), []
    while data:
        size = rng.choice((1, 2, 3, 7, 50))
        found += splitter.feed(data[:size])
        data = data[size:]
    assert splitter.end() is None
    return [item for item in found if isinstance(item, DroppedLine) or item.strip()]


@settings(max_examples=150, deadline=None)
@given(st.lists(VALUES, max_size=5), st.booleans(), st.sampled_from([None, 1]), st.randoms(use_true_random=False))
def test_items_are_the_bytes_between_the_commas(
    values: list[object], ascii_only: bool, indent: int | None, rng: random.Random
) -> None:
    text = json.dumps(values, ensure_ascii=ascii_only, indent=indent)
    found = items(rng.choice((b"", b"\xef\xbb\xbf", b"\n ")) + text.encode() + rng.choice((b"", b"\n")), rng)
    assert [json.loads(item) for item in found if isinstance(item, bytes)] == values


def test_an_item_that_is_too_long_is_dropped_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_splitter, "MAX_LINE_BYTES", 20)
    found = items(b'[{"a": 1}, {"a": "' + b"x" * 90 + b'"}, {"a": 2}]', random.Random(0))
    assert [item if isinstance(item, bytes) else item.num_bytes for item in found] == [b'{"a": 1}', 100, b' {"a": 2}']


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'[{"a": 1}, {"a": ', "ends in its item 2"),
        (b'[{"a": "\\', "ends in its item 1"),
        (b'[{"a": 1}]\n[{"a": 2}]', "more after the end"),
    ],
)
def test_an_array_that_does_not_end_well(data: bytes, reason: str) -> None:
    splitter = ArraySplitter(max_bytes=None)
    splitter.feed(data)
    with pytest.raises(DamagedInput, match=reason):
        splitter.end()


def read(path: Path) -> list[Job | JobResult]:
    return [row for batch in RowReader([str(path)], RowParser({})).batches() for row in batch]


def test_rows_of_an_array_and_a_bad_item_among_them(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_bytes(b'[\n{"id": "a",\n "prompt": "p", "x": 1.50},\n{"prompt": tru},\n7,\n{"prompt": "q"}\n]\n')
    rows = read(path)
    assert bytes(rows[0].context.extra["x"]) == b"1.50"
    assert [row.error.message[:25] for row in rows if isinstance(row, JobResult) and row.error] == [
        "item 2: not valid JSON: i",
        "item 3: expected an objec",
    ]
    assert [(row.context.id, row.context.line) for row in rows if isinstance(row, Job)] == [
        ("a", "item 1"),
        ("row-3", "item 4"),
    ]


def test_copied_values_stand_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_bytes(b'[{"prompt": "p", "x": [\n 1.50,\n {"y":\n 2}\n]}]')
    (row,) = read(path)
    assert bytes(row.context.extra["x"]) == b'[  1.50,  {"y":  2} ]'


def test_rows_on_lines_are_still_read(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_bytes(b'\xef\xbb\xbf\n{"prompt": "p", "x": [1]}\n{"prompt": "q"}')
    rows = read(path)
    assert [(row.context.line, extra_of(row)) for row in rows] == [("line 2", {"x": [1]}), ("line 3", {})]


def test_a_file_that_is_cut_off_is_an_error_after_its_whole_items(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    path.write_bytes(b'[{"prompt": "p"}, {"prompt": "q')
    batches = RowReader([str(path)], RowParser({})).batches()
    assert len(next(batches)) == 1
    with pytest.raises(ConfigError, match=r"in\.json: cannot be read past item 1: the array does not end"):
        next(batches)


def rows_and_places(path: Path, data: bytes, parser: RowParser | None = None) -> list[tuple[str | None, str]]:
    path.write_bytes(data)
    reader = RowReader([str(path)], parser or RowParser({}), check_columns=True)
    rows = [row for batch in reader.batches() for row in batch]
    assert reader.bytes_read == reader.bytes_total
    return [(row.prompt if isinstance(row, Job) else None, row.context.line) for row in rows]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("size", [1, 1000])
def test_the_rows_of_an_object_are_its_only_list_of_objects(
    tmp_path: Path, indent: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(compression.READ_BYTES, "", size)
    path = tmp_path / "in.json"
    held = {'v\u00e4"[': "1.0", "a": [1, "[{"], "b": {"c": [{"prompt": "no"}]}, "d": [[{"prompt": "no"}]]}
    rows = [{"prompt": "p"}, {"prompt": "q", "x": [{"y": "]}"}]}]
    two = [("p", "item 1"), ("q", "item 2")]
    for values in ({"data": rows, **held}, {**held, "data": rows}, {"data": rows}):
        assert rows_and_places(path, b"\n " + json.dumps(values, indent=indent).encode() + b"\n\n") == two
    both = json.dumps({**held, "train": rows, "test": rows}, indent=indent).encode()
    with pytest.raises(
        ColumnsError, match=r"several lists of rows: `train`, `test`; take one .*: jq '\.\[\"train\"\]' "
    ):
        rows_and_places(path, both)
    with pytest.raises(ColumnsError, match="its only row has no prompt: its columns are `v"):
        rows_and_places(path, json.dumps(held, indent=indent).encode())


@pytest.mark.parametrize("indent", [None, 1])
def test_an_object_with_a_prompt_is_one_row(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "in.json"
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    assert rows_and_places(path, json.dumps(messages, indent=indent).encode()) == [(None, "line 1")]
    request = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "p"}, "x": [{}]}
    assert rows_and_places(path, json.dumps(request, indent=indent).encode()) == [("p", "line 1")]
    parser = RowParser({}, rules=PromptRules(prompt_template=TextTemplate("{q}")))
    assert rows_and_places(path, json.dumps({"q": "p", "x": [{}]}, indent=indent).encode(), parser) == [("p", "line 1")]
    parser = RowParser({}, RowKeys(prompt="q"))
    assert rows_and_places(path, b"\n" * 9 + json.dumps({"q": "p"}).encode(), parser) == [("p", "line 10")]


def test_rows_on_lines_may_hold_lists_too(tmp_path: Path) -> None:
    path = tmp_path / "in.json"
    data = b'{"x": [{"prompt": "no"}], "prompt": "p"}\n{"prompt": "q", "x": [{}]}\n'
    assert rows_and_places(path, data) == [("p", "line 1"), ("q", "line 2")]
    assert rows_and_places(path, data[:-5]) == [("p", "line 1"), (None, "line 2")]


def test_a_list_that_is_cut_off_is_an_error_after_its_whole_items(tmp_path: Path) -> None:
    path = tmp_path / "in.json.gz"
    data = gzip.compress(b'{"data": [{"prompt": "p"}, {"prompt": "q"}]}' + b" " * 900_000)
    for cut in (data[:-20], gzip.compress(b'{"data": [{"prompt": "p"}, {"pro')):
        path.write_bytes(cut)
        batches = RowReader([str(path)], RowParser({})).batches()
        assert next(batches)
        with pytest.raises(ConfigError, match=r"in\.json\.gz: cannot be read past item \d: the "):
            list(batches)
