"""CSV, TSV, text and Arrow files give rows, and what cannot be a row is an error that names its line."""

from __future__ import annotations

import array
import contextlib
import csv
import gzip
import io
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.ipc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nvcli.core.text_template import TextTemplate
from nvcli.errors import ConfigError, InputChanged
from nvcli.job import compression
from nvcli.job.files import check_inputs
from nvcli.job.input import csv_source
from nvcli.job.input.column_check import ColumnsError
from nvcli.job.input.csv_source import CsvSource
from nvcli.job.input.known_input import know_inputs
from nvcli.job.input.reader import RowReader
from nvcli.job.job import Job, JobResult, RowForm
from nvcli.job.row_set import AnsweredRows
from nvcli.job.rows.native_row import RowKeys
from nvcli.job.rows.parser import Cells, RowParser
from nvcli.job.rows.prompt_rules import PromptRules
from output_jobs import extra_of


def read(path: Path, data: bytes | None = None, *, parser: RowParser | None = None, **options: Any) -> list[Any]:
    if data is not None:
        path.write_bytes(data)
    check_inputs([str(path)])
    reader = RowReader([str(path)], parser or RowParser({}), **options)
    rows = [row for batch in reader.batches() for row in batch]
    assert reader.bytes_read == reader.bytes_total
    return rows


def jobs(rows: list[Any]) -> list[tuple[Any, str | None, dict[str, Any]]]:
    return [(row.context.id, row.prompt, extra_of(row)) for row in rows if isinstance(row, Job)]


def errors(rows: list[Any]) -> list[tuple[str, str]]:
    return [(row.error.type, row.error.message) for row in rows if isinstance(row, JobResult) and row.error]


def test_cells_are_texts_and_empty_ones_are_absent(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbfid,prompt,note,n\r\n7,"two\r\nlines, ""quoted""",,1.50\r\n\r\n,p,"",x\r\n'
    rows = read(tmp_path / "in.csv", data)
    assert jobs(rows) == [("7", 'two\r\nlines, "quoted"', {"n": "1.50"}), ("row-1", "p", {"n": "x"})]
    assert [row.context.line for row in rows] == ["lines 2 to 3", "line 5"]


def test_a_table_of_a_spreadsheet(tmp_path: Path) -> None:
    rows = read(tmp_path / "in.csv", b'sep=;\r\n"id";"a, b";prompt\r\n7;x;"p;q"\r\n')
    assert jobs(rows) == [("7", "p;q", {"a, b": "x"})]
    assert rows[0].context.line == "line 3"
    for mark in ";\t|":
        data = b'"id";"a, b";prompt\n7;x;p\n'.replace(b";", mark.encode())
        assert jobs(read(tmp_path / "in2.csv", data)) == [("7", "p", {"a, b": "x"})]


def test_nvclis_own_lists_and_objects_are_json_in_their_cells(tmp_path: Path) -> None:
    def cells(*values: object) -> str:
        written = io.StringIO()
        csv.writer(written, delimiter="\t").writerow(values)
        return written.getvalue()

    text = cells("messages", "prompt_token_ids", "sampling", "chat_template_kwargs", "list")
    text += cells('[{"role": "user", "content": "hi"}]', "", '{"n": 2}', '{"a": 1}', "[1]")
    text += cells("", "[1, 2]", "null", "", "")
    text += cells("", "1, 2", "", "", "")
    text += cells("", "[" * 401 + "]" * 401, "", "", "")
    rows = read(tmp_path / "in.tsv", text.encode())
    first, second = rows[:2]
    assert (first.messages[0]["content"], first.sampling.n, first.chat_template_kwargs) == ("hi", 2, {"a": 1})
    assert extra_of(first) == {"list": "[1]"}
    assert second.prompt_token_ids == [1, 2]
    assert errors(rows) == [
        ("invalid_json", 'line 4: the cell of `prompt_token_ids` is "1, 2", which is not JSON, as this column must be'),
        ("invalid_json", "line 5: `prompt_token_ids` is nested too deep; allowed: 400 levels of objects and lists"),
    ]


def test_a_row_of_a_batch_file_in_csv(tmp_path: Path) -> None:
    data = b'custom_id,url,body\na,/v1/completions,"{""prompt"": ""p"", ""max_tokens"": 3}"\n'
    (row,) = read(tmp_path / "in.csv", data)
    assert (row.context.form, row.prompt, row.sampling.max_tokens) == (RowForm.COMPLETION, "p", 3)


def test_records_that_are_no_rows(tmp_path: Path) -> None:
    data = b'id,prompt\na,p,more\nb\n"c"x,p\nd,\xff\ne,p\nf,"open\n'
    rows = read(tmp_path / "in.csv", data)
    assert jobs(rows) == [("e", "p", {})]
    kinds = [(kind, message.partition(":")[0]) for kind, message in errors(rows)]
    assert kinds == [
        ("ragged_row", "line 2"),
        ("ragged_row", "line 3"),
        ("invalid_csv", "line 4"),
        ("invalid_utf8", "line 5"),
        ("invalid_csv", "line 7"),
    ]
    told = [message for _, message in errors(rows)]
    assert "it has 3 cells, and there are 2 columns: `id`, `prompt`" in told[0]
    assert told[2].endswith("a quote stands inside a cell in quotes; write two of them, and no backslash")
    assert told[4].endswith("a quote is not closed")


def test_a_quote_that_is_not_closed_takes_a_bounded_part_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_source, "MAX_RECORD_BYTES", 50)
    rows = read(tmp_path / "in.csv", b'prompt\n"open\n' + b"p\n" * 100)
    assert errors(rows)[0][0] == "line_too_long"
    assert len(jobs(rows)) == 100 - (50 - len('"open\n')) // 2 - 1


def test_columns_without_names_get_numbers(tmp_path: Path) -> None:
    rows = read(tmp_path / "in.csv", b"prompt,,x,\np,,1,\nq,2,,3\n")
    assert jobs(rows) == [("row-0", "p", {"x": "1"}), ("row-1", "q", {"column 2": "2", "column 4": "3"})]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.text(alphabet='a",;\t\r\nü ', max_size=6), min_size=2, max_size=2), max_size=8),
    st.sampled_from([",", ";", "\t"]),
    st.sampled_from(["\n", "\r\n"]),
)
@example([["", "\r\n"]], ",", "\n")
def test_what_a_csv_writer_wrote_is_read(
    tmp_path_factory: pytest.TempPathFactory, records: list[list[str]], delimiter: str, line_end: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator=line_end, quoting=csv.QUOTE_ALL)
        writer.writerows([["a", "b"], *records])
    found = [dict(row) for row in CsvSource(str(path)).lines() if isinstance(row, Cells)]
    expected = [{key: cell for key, cell in zip("ab", record, strict=True) if cell} for record in records]
    assert found == expected


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"a,b,a\n1,2,3\n", "names `a` twice"),
        (b"caf\xe9\n", "cannot be read: not UTF-8 text .*`iconv -f WINDOWS-1252 -t UTF-8`"),
        (b'"a\n', "cannot be read: not valid CSV"),
        (b"a,b\r1,2\r", "cannot be read: not valid CSV: a carriage return"),
    ],
)
def test_a_header_that_names_no_columns(tmp_path: Path, header: bytes, reason: str) -> None:
    with pytest.raises(ColumnsError, match=r"in\.csv: line 1, which names the columns, .*" + reason):
        read(tmp_path / "in.csv", header)


@pytest.mark.parametrize("name", ["in.csv", "in.txt", "in.txt.gz"])
def test_text_of_wide_characters_is_refused(tmp_path: Path, name: str) -> None:
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"):
        told = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
        data = "a,b\n1,2\n".encode(encoding)
        plain = tmp_path / name.removesuffix(".gz")
        with pytest.raises(
            ColumnsError, match=rf"{name}: its first line [^:]*: iconv -f {told} -t UTF-8 {plain} > utf8\."
        ):
            read(tmp_path / name, gzip.compress(data) if name.endswith(".gz") else data)


def test_files_without_rows(tmp_path: Path) -> None:
    for name, data in (
        ("a.csv", b""),
        ("b.csv", b"id,prompt\n"),
        ("c.txt", b"\n \n"),
        ("d.json", b"[ ]"),
        ("e.json", b""),
    ):
        assert read(tmp_path / name, data, check_columns=True) == []


def test_a_line_of_text_is_a_prompt(tmp_path: Path) -> None:
    path = tmp_path / "in.txt.gz"
    data = gzip.compress(b'\xef\xbb\xbfone \r\n\n{"prompt": 1}\n\xff\nlast')
    rows = read(path, data, parser=RowParser({}, RowKeys(prompt="question")))
    assert jobs(rows) == [("row-0", "one ", {}), ("row-1", '{"prompt": 1}', {}), ("row-3", "last", {})]
    assert errors(rows) == [("invalid_utf8", "line 4: not UTF-8 text (invalid start byte)")]
    rules = PromptRules(prompt_template=TextTemplate("Say {prompt}!"))
    (first, *_) = read(path, parser=RowParser({}, rules=rules))
    assert (first.prompt, extra_of(first)) == ("Say one !", {"prompt": "one "})


def test_rows_that_are_answered_are_passed_over(tmp_path: Path) -> None:
    done = AnsweredRows()
    for index in (0, 1):
        done.all.add(index)
    rows = read(tmp_path / "in.csv", b"id,prompt\na,p\nb,p\na,q\nc,p\n", answered=done)
    assert jobs(rows) == [("c", "p", {})]
    assert errors(rows)[0][0] == "duplicate_id"
    done.all.discard(1)
    assert [row.context.id for row in read(tmp_path / "in.txt", b"p\nq\nr\n", answered=done)] == ["row-1", "row-2"]


@pytest.mark.parametrize("kind", ["file", "stream", "feather"])
def test_arrow_tables(tmp_path: Path, kind: str) -> None:
    table = pyarrow.table(
        {"id": range(700), "prompt": [f"p{i}" if i != 3 else None for i in range(700)], "x": [None] * 700}
    )
    path = tmp_path / "in.arrow"
    if kind == "feather":
        path = tmp_path / "in.feather"
        pyarrow.feather.write_feather(table, path, compression="zstd", chunksize=300)
    else:
        make = pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream
        with make(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    rows = read(path)
    assert len(rows) == 700
    assert [row.prompt for row in rows if isinstance(row, Job)] == [f"p{i}" for i in range(700) if i != 3]
    assert [message for _, message in errors(rows)] == [
        "row 4: none of `prompt`, `messages` and `prompt_token_ids` is given; give one"
    ]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if kind == "stream":
        reader = RowReader([str(path)], RowParser({}))
        with pytest.raises((ConfigError), match=r"in\.arrow: cannot be read"):
            list(reader.batches())
        return
    with pytest.raises(ConfigError, match=r"cannot be read: ArrowInvalid: Not an Arrow file\. Replace"):
        read(path)


def test_an_arrow_file_with_another_name_and_another_file_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"ARROW1\0\0")
    with pytest.raises(ConfigError, match=r"holds an Arrow table, and its name does not say so"):
        check_inputs([str(path)])
    path = tmp_path / "in.arrow"
    path.write_bytes(b'{"prompt": "p"}\n')
    with pytest.raises(ConfigError, match=r"is not an Arrow table, as its name says"):
        check_inputs([str(path)])
    path = path.rename(tmp_path / "in.arrow.gz")
    with pytest.raises(ConfigError, match=r"is a compressed Arrow file, which is not read; unpack it"):
        check_inputs([str(path)])


@pytest.mark.parametrize("name", ["in.csv", "in.txt", "in.json"])
def test_an_input_that_is_changed_while_it_is_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compression.READ_BYTES, "", 100)
    monkeypatch.setattr("nvcli.job.input.reader.MAX_BATCH_ROWS", 8)
    rows = {"in.csv": "prompt\n" + "p\n" * 500, "in.txt": "p\n" * 500, "in.json": f"[{','.join(['{}'] * 500)}]"}
    path = tmp_path / name
    path.write_text(rows[name])
    batches = RowReader([str(path)], RowParser({}), known=know_inputs([str(path)])).batches()
    assert next(batches)
    path.write_text(rows[name][:-20])
    with pytest.raises(InputChanged):
        list(batches)


def test_rows_of_a_pipe_come_before_it_has_more(tmp_path: Path) -> None:
    fifo = tmp_path / "in.csv"
    os.mkfifo(fifo)
    go_on = threading.Event()

    def write() -> None:
        with fifo.open("wb", buffering=0) as file:
            file.write(b"prompt\na\n")
            go_on.wait(30)
            file.write(b'"b\nc"\n')

    writer = threading.Thread(target=write)
    writer.start()
    batches = RowReader([str(fifo)], RowParser({}), check_columns=True).batches()
    assert [job.prompt for job in next(batches) if isinstance(job, Job)] == ["a"]
    go_on.set()
    assert [job.prompt for batch in batches for job in batch if isinstance(job, Job)] == ["b\nc"]
    writer.join()


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from([b'"', b",", b"\n", b"\r\n", b"\t", b"[", b"]", b"{", b"}", b'{"prompt":"p"}', b"a", b"\xff"])
    ),
    st.sampled_from(["any.csv", "any.tsv", "any.txt", "any.json"]),
)
def test_whatever_bytes_a_file_holds_rows_and_errors_come_of_it(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], name: str
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(b"".join(pieces))
    rows: list[Job | JobResult] = []
    with contextlib.suppress(ConfigError):
        for batch in RowReader([str(path)], RowParser({})).batches():
            rows += batch
    assert [row.context.index for row in rows] == list(range(len(rows)))


def test_rows_before_and_after_a_damaged_table_are_given_out(tmp_path: Path) -> None:
    before, bad, after = tmp_path / "a.txt", tmp_path / "b.arrow", tmp_path / "c.txt"
    before.write_text("p\nq\n")
    bad.write_bytes(b"ARROW1\0\0" + b"x" * 100)
    after.write_text("r\n")
    batches = RowReader([str(before), str(bad), str(after)], RowParser({})).batches()
    assert [job.prompt for job in next(batches) if isinstance(job, Job)] == ["p", "q", "r"]
    with pytest.raises(ConfigError, match=r"b\.arrow: cannot be read: ArrowInvalid"):
        next(batches)


def ints(*values: int) -> bytes:
    return array.array("i", values).tobytes()


TEXTS = pyarrow.array(["x", "y", "z"])
PAIRS = pyarrow.array(["aa", "bb", "cc"])
VIEW = b"a text that stands outside"
DAMAGED: dict[str, tuple[Any, bytes, bytes]] = {
    "far": (TEXTS, ints(0, 1, 2, 3), ints(0, 1, 2, 4000)),
    "back": (TEXTS, ints(0, 1, 2, 3), ints(0, 3, 1, 3)),
    "negative": (TEXTS, ints(0, 1, 2, 3), ints(0, 1, -5, 3)),
    "words": (
        pyarrow.DictionaryArray.from_arrays(pyarrow.array([2, 0, 1], pyarrow.int32()), PAIRS),
        ints(2, 0, 1),
        ints(2, 0, 900),
    ),
    "lists": (pyarrow.ListArray.from_arrays([0, 1, 2, 3], PAIRS), ints(0, 1, 2, 3), ints(0, 1, 5000, 3)),
    "inner": (pyarrow.StructArray.from_arrays([TEXTS], ["text"]), ints(0, 1, 2, 3), ints(0, 1, 2, 4000)),
    "runs": (
        pyarrow.RunEndEncodedArray.from_arrays(pyarrow.array([1, 2, 3], pyarrow.int32()), PAIRS),
        ints(1, 2, 3),
        ints(1, 9, 3),
    ),
    "view": (pyarrow.array([VIEW] * 3, pyarrow.string_view()), VIEW[:4] + ints(0, 0), VIEW[:4] + ints(0, 9_000_000)),
}
"""Columns, and bytes of theirs that become others: where their values are. Followed without a check, they give memory
that is not the file's, or crash."""


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("kind", ["file", "stream"])
def test_a_damaged_column_is_an_error_that_names_it(tmp_path: Path, name: str, kind: str) -> None:
    column, sound, damaged = DAMAGED[name]
    batch = pyarrow.record_batch([pyarrow.array(["p", "qq", "rrr"]), column], ["prompt", name])
    path = tmp_path / "in.arrow"
    make = pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream
    with make(path, batch.schema) as writer:
        writer.write_batch(batch)
    assert len(read(path)) == 3
    data = path.read_bytes()
    assert sound in data
    match = rf"in\.arrow: cannot be read: the column `{name}` is damaged: .*\. Replace it with an intact file"
    with pytest.raises(ConfigError, match=match):
        read(path, data.replace(sound, damaged))


@pytest.mark.parametrize(
    ("kind", "of_text"),
    [
        (pyarrow.string_view(), lambda text: text),
        (pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), lambda text: text),
        (pyarrow.list_(pyarrow.struct([("t", pyarrow.large_string())])), lambda text: [{}, {"t": text}]),
        (pyarrow.map_(pyarrow.string(), pyarrow.list_(pyarrow.string(), 1)), lambda text: [("k", [text])]),
    ],
    ids=["view", "dictionary", "list", "map"],
)
def test_a_text_of_a_table_that_is_not_utf8_is_an_error_row(
    tmp_path: Path, kind: pyarrow.DataType, of_text: Callable[[str], object]
) -> None:
    path = tmp_path / "in.arrow"
    texts = pyarrow.array([None, *map(of_text, ("p", "xyz", "rrr"))], kind)
    batch = pyarrow.record_batch([pyarrow.array("0123"), texts], ["prompt", "texts"]).slice(1)
    with pyarrow.ipc.new_file(path, batch.schema) as writer:
        writer.write_batch(batch)
    rows = read(path, path.read_bytes().replace(b"xyz", b"x\xffz"))
    assert [prompt for _, prompt, _ in jobs(rows)] == ["1", "3"]
    assert errors(rows) == [("invalid_utf8", "row 2: `texts`: not UTF-8 text (invalid start byte)")]


def test_one_value_of_many_rows_is_not_made_for_all_of_them_at_once(tmp_path: Path) -> None:
    rows = 400
    large = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * rows, pyarrow.int8()), pyarrow.array(["x" * 20_000_000])
    )
    path = tmp_path / "in.arrow"
    with pyarrow.ipc.new_file(path, pyarrow.schema([("prompt", large.type)])) as writer:
        writer.write_batch(pyarrow.record_batch([large], ["prompt"]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batches = RowReader([str(path)], RowParser({})).batches()
    assert [len(next(batches)) for _ in range(3)] == [1, 1, 1]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10  # KiB; all of them are 8 GB


def test_a_row_of_a_table_that_is_too_large_is_an_error_row(tmp_path: Path) -> None:
    offsets = pyarrow.py_buffer(array.array("i", [0, 3, (1 << 31) - 1, (1 << 31) - 1]))
    nulls = pyarrow.nulls((1 << 31) - 1)  # no bytes at all
    column = pyarrow.Array.from_buffers(pyarrow.list_(pyarrow.null()), 3, [None, offsets], children=[nulls])
    path = tmp_path / "in.arrow"
    batch = pyarrow.record_batch([pyarrow.array(["p", "q", "r"]), column], ["prompt", "x"])
    with pyarrow.ipc.new_file(path, batch.schema) as writer:
        writer.write_batch(batch)
    rows = read(path)
    assert jobs(rows) == [("row-0", "p", {"x": [None] * 3}), ("row-2", "r", {"x": []})]
    assert errors(rows) == [("line_too_long", "row 2: longer than 512 MiB, the most that a row may have")]
