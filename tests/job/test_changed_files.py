"""An input or an output that somebody else changes during a run ends the run, and the job is not taken for finished."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow
import pyarrow.parquet
import pytest

from nvcli.errors import ConfigError, InputChanged, OutputError
from nvcli.job import compression
from nvcli.job.input.known_input import check_unchanged, know_inputs
from nvcli.job.input.reader import RowReader
from nvcli.job.job import Job
from nvcli.job.output.job_output import JobOutput
from nvcli.job.output.manifest import manifest_path
from nvcli.job.output.writer import ResultWriter
from nvcli.job.own_files import rows_path
from nvcli.job.rows.parser import RowParser
from output_jobs import open_job, plain_bytes, result_of, write

Change = Callable[[Path], None]


def later(path: Path) -> None:
    """Give a file a time of change that no other file has had."""
    now = path.stat().st_mtime_ns + 1_000_000_000
    os.utime(path, ns=(now, now))


def edited(path: Path, find: bytes, replace: bytes) -> None:
    """Edit a file in its place, as some editors do."""
    data = path.read_bytes()
    assert find in data
    with path.open("r+b") as file:
        file.write(data.replace(find, replace, 1))
        file.truncate()
    later(path)


def replaced(path: Path) -> None:
    """As `sed -i` does."""
    copy = path.with_name("copy")
    copy.write_bytes(path.read_bytes())
    copy.replace(path)


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"{}\n")


CHANGES: dict[str, Change] = {
    "replaced": replaced,
    "removed": Path.unlink,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 5),
    "emptied": lambda path: os.truncate(path, 0),
    "appended": appended,
    "edited": lambda path: edited(path, b'"index":1', b'"index":9'),
}


def run(path: Path, change: Change, *, at: int) -> JobOutput:
    """A job of six rows, of which two are there already, whose output is changed before row `at` is written."""
    output = open_job(path)
    try:
        writer = ResultWriter(output.sink, output.form)
        try:
            for row in range(2, 6):
                if row == at:
                    change(rows_path(path))
                writer.write([result_of(row)])
                writer.flush()
            if at == 6:
                change(rows_path(path))
            writer.close()
        finally:
            writer.close_early()
        output.finish(rows=6, errors={}, rows_read=6, all_read=True)
        return output
    finally:
        output.close()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *itertools.product(["out.jsonl", "out.parquet"], CHANGES),
        *(("out.jsonl.gz", change) for change in CHANGES if change != "edited"),
    ],
)
@pytest.mark.parametrize("at", [2, 5, 6])
def test_a_changed_output_is_not_finished_and_can_be_continued(tmp_path: Path, name: str, at: int, change: str) -> None:
    path = tmp_path / name
    write(path, [0, 1], failing=())
    with pytest.raises(OutputError, match=r"was changed by another program during the run"):
        run(path, CHANGES[change], at=at)
    assert msgspec.json.decode(manifest_path(path).read_bytes())["finished"] is None
    write(path, range(6), failing=(), finish=True)
    if name == "out.parquet":
        found = pyarrow.parquet.read_table(path).column("index").to_pylist()
    else:
        found = [msgspec.json.decode(line)["index"] for line in plain_bytes(path).splitlines()]
    assert sorted(found) == list(range(6))


def test_an_edit_that_keeps_rows_whole_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, [0, 1], failing=())
    with pytest.raises(OutputError, match="it holds other bytes than were written"):
        run(path, lambda path: edited(path, b'"id":"r3"', b'"id":"x3"'), at=5)


def test_a_touched_or_linked_output_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, [0, 1], failing=())

    def touch(path: Path) -> None:
        later(path)
        path.chmod(0o600)
        os.link(path, tmp_path / "link")

    run(path, touch, at=5)
    output = open_job(path)
    output.close()
    assert output.finished is not None


def test_a_new_output_that_is_removed_before_its_first_row_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = open_job(path)
    path.unlink()
    with pytest.raises(OutputError, match="was changed by another program"):
        output.sink.start()
    output.close()


LINES = b"".join(b'{"prompt":"row %03d"}\n' % row for row in range(100))


class ChangedInput:
    """Reads an input of a hundred rows, in small chunks, and changes it after some of them."""

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self.path = path
        path.write_bytes(LINES)
        self.known = know_inputs([name or str(path)])
        self.rows: list[str | None] = []

    def read(self, *changes: Change) -> None:
        """Make one change after every third of the chunks."""
        todo = list(changes)
        reader = RowReader([self.known[0].name], RowParser({}), known=self.known)
        for number, rows in enumerate(reader.batches()):
            self.rows += [row.prompt if isinstance(row, Job) else None for row in rows]
            if number % 3 == 2 and todo:
                todo.pop(0)(self.path)


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compression.READ_BYTES, "", 100)
    monkeypatch.setattr("nvcli.job.input.reader.MAX_BATCH_ROWS", 8)


@pytest.mark.usefixtures("small_reads")
@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.truncate(path, 10),
        lambda path: os.truncate(path, len(LINES) - 10),
        lambda path: edited(path, b"row 090", b"row xxx"),
        lambda path: edited(path, b"row 001", b"row xxx"),
        appended,
    ],
)
def test_no_row_is_read_from_an_input_that_was_changed(tmp_path: Path, change: Change) -> None:
    changed = ChangedInput(tmp_path / "in.jsonl")
    with pytest.raises(InputChanged, match=r"in\.jsonl was changed during the run: .*the same command continues"):
        changed.read(change)
    assert 0 < len(changed.rows) < 60
    assert changed.rows == [f"row {row:03}" for row in range(len(changed.rows))]
    with pytest.raises(InputChanged):
        check_unchanged(changed.known)
    changed.path.write_bytes(LINES)
    check_unchanged(changed.known)


@pytest.mark.usefixtures("small_reads")
def test_an_input_that_is_cut_and_restored_loses_no_rows(tmp_path: Path) -> None:
    changed = ChangedInput(tmp_path / "in.jsonl")

    def cut_and_restore(path: Path) -> None:
        os.truncate(path, 0)
        path.write_bytes(LINES)
        later(path)

    changed.read(cut_and_restore, later, replaced, Path.unlink)  # what was opened is read on
    assert changed.rows == [f"row {row:03}" for row in range(100)]
    with pytest.raises(InputChanged, match="No such file"):
        check_unchanged(changed.known)


@pytest.mark.usefixtures("small_reads")
def test_an_input_that_was_replaced_before_it_was_opened(tmp_path: Path) -> None:
    changed = ChangedInput(tmp_path / "in.jsonl")
    replaced(changed.path)  # by the same bytes
    changed.read()
    assert len(changed.rows) == 100
    changed = ChangedInput(tmp_path / "in.jsonl")
    changed.path.write_bytes(LINES.replace(b"row", b"raw"))
    with pytest.raises(InputChanged):
        changed.read()
    assert changed.rows == []


def test_a_table_that_is_changed_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [f"row {row:03}" for row in range(900)]}), path)
    known = know_inputs([str(path)])
    batches = RowReader([str(path)], RowParser({}), known=known).batches()
    assert next(batches)
    Path.unlink(path)
    with pytest.raises(InputChanged):
        list(batches)


def test_an_input_that_cannot_be_read_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^the input /proc/self/mem cannot be read: Input/output error$"):
        know_inputs(["/proc/self/mem"])  # a regular file, whose error in a read has no name
