"""Whatever is raised while one row is read, prepared or answered costs that row its answer, and no other row anything.

Exceptions that nobody foresaw are raised on purpose here, at each station of a row; every job has rows beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine
from file_jobs import generate
from kept_lines import KeptLines
from nvcli.core.config import RunConfig
from nvcli.errors import RowError, WorkerError, first_line
from nvcli.job.job import Job, JobResult, RowContext, failed
from nvcli.job.output import writer
from nvcli.job.progress.summary import Summary
from nvcli.job.rows.parser import RowParser
from nvcli.job.run import open_rows
from nvcli.job.run.early_end import RowTracebacks
from nvcli.job.run.open_rows import OpenRow
from nvcli.job.text.prepare import Preparer
from nvcli.job.text.stop_strings import StopStringDetector

pytestmark = pytest.mark.usefixtures("tokenizer")

STATIONS = ("parse", "prepare", "panic", "requests", "stop", "answer", "write", "equal")
"""The ids of rows, for each of which something is raised where the name says."""


class PanicException(BaseException):
    """A panic of Rust code is no `Exception`."""


PanicException.__module__ = "pyo3_runtime"


def raise_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, id_of: Callable[..., Any], *stations: str) -> None:
    """Let a method raise for the rows of these stations, by the id that it is called for."""
    method = getattr(owner, name)

    def raise_or_go_on(*args: Any, **kwargs: Any) -> Any:
        station = str(id_of(*args, **kwargs))
        if station in stations:
            raise PanicException("panic") if station == "panic" else LookupError(station)
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, raise_or_go_on)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> None:
    def id_of_line(parser: RowParser, line: bytes, **_: Any) -> Any:
        return json.loads(line).get("id")

    def id_of_answered(result: JobResult, *_: Any) -> Any:
        return result.context.id if result.error is None else None

    raise_at(monkeypatch, RowParser, "parse", id_of_line, "parse")
    raise_at(monkeypatch, Preparer, "_prepare_row", lambda _, prompt: prompt.job.context.id, "prepare", "panic")
    raise_at(monkeypatch, OpenRow, "requests", lambda row, _: row.prepared.context.id, "requests")
    raise_at(monkeypatch, open_rows, "_result_of", lambda row, *_: row.prepared.context.id, "answer", "equal")
    raise_at(monkeypatch, StopStringDetector, "push", lambda *_: "stop", "stop")
    raise_at(monkeypatch, writer, "output_row", id_of_answered, "write")


def job(folder: Path, model: Path, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], Summary, list[str]]:
    """Answer rows. Returns the output rows by id, the summary and the warnings."""
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    progress, output = KeptLines(), folder / "out.jsonl"
    summary = generate(
        RunConfig(model=str(model), device="cpu", max_num_seqs=8),
        inputs=[str(source)],
        output=str(output),
        start=FakeEngine,
        progress=progress,
        overwrite=True,
    )
    found = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert len(found) == len(rows)
    return {row["id"]: row for row in found}, summary, progress.warnings


def make_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"id": f"{number}", "prompt": f"prompt {number}"} for number in range(40)]
    for number, station in enumerate(STATIONS):
        row = {"id": station, "prompt": f"a {station}", "kept": [1], "sampling": {"temperature": 0, "n": 2}}
        if station == "stop":
            row["sampling"] = {"stop": "stop", "n": 2}
        rows.insert(5 * number, row)
    # It is equal to a row whose answer cannot be read, and waits for it.
    return [*rows, {"id": "follower", "prompt": "a equal", "sampling": {"temperature": 0, "n": 2}}]


def test_a_fault_at_any_station_costs_its_own_row(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    rows = make_rows()
    sound, _, sound_warnings = job(tmp_path, model_folder, rows)
    assert not [row for row in sound.values() if row["error"]]
    request.getfixturevalue("faults")
    found, summary, warnings = job(tmp_path, model_folder, rows)
    wrong = {row["index"]: row for row in found.values() if row["error"] is not None}
    expected = [row["index"] for row in sound.values() if row["id"] in (*STATIONS, "follower")]
    assert sorted(wrong) == sorted(expected)
    assert summary.errors == {"internal_error": len(STATIONS) + 1}
    for row in found.values():
        if row["error"] is None:
            assert {**row, "usage": 0} == {**sound[row["id"]], "usage": 0}
            continue
        assert row["error"]["type"] == "internal_error"
        assert row["error"]["message"].startswith(f"line {row['index'] + 1}: ")
        assert row["choices"] == []
        if row["id"] in STATIONS:  # but for the one that could not be parsed
            assert row["kept"] == [1]
            reason = "PanicException: panic" if row["id"] == "panic" else f"LookupError: {row['id']}"
            assert f"failed: {reason}; this is a bug" in row["error"]["message"]
    kept = (tmp_path / "out.jsonl.traceback.txt").read_text()
    for station in STATIONS:
        assert kept.count("PanicException: panic\n" if station == "panic" else f"LookupError: {station}\n") == 1
    (warning,) = [line for line in warnings if line not in sound_warnings]
    assert "internal_error" not in warning
    assert f"(traceback: {tmp_path}/out.jsonl.traceback.txt)" in warning


def test_what_cannot_be_written_at_all_is_left_out(tmp_path: Path, model_folder: Path, monkeypatch: Any) -> None:
    """Here what the row passes through is at fault, of which the error's own line would fail too."""
    parse = RowParser.parse

    def parse_badly(parser: RowParser, *args: Any, **kwargs: Any) -> Job | JobResult:
        row = parse(parser, *args, **kwargs)
        if row.context.id == "bad":
            row.context.extra["text"] = "\ud800"
        return row

    monkeypatch.setattr(RowParser, "parse", parse_badly)
    rows = [{"id": "bad", "prompt": "a", "kept": 1}, {"id": "good", "prompt": "b", "kept": 1}]
    found, _, _ = job(tmp_path, model_folder, rows)
    assert found["bad"]["error"]["type"] == "internal_error"
    assert "UnicodeEncodeError" in found["bad"]["error"]["message"]
    assert "kept" not in found["bad"]
    assert (found["good"]["error"], found["good"]["kept"]) == (None, 1)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, WorkerError("no process can be started")])
def test_faults_of_the_run_end_it(error: Any, tmp_path: Path, model_folder: Path, monkeypatch: Any) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Preparer, "_prepare_row", fail)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        job(tmp_path, model_folder, [{"prompt": "a"}, {"prompt": "b"}])


def test_tracebacks_of_rows_are_few_and_small(tmp_path: Path) -> None:
    said: list[str] = []
    output = tmp_path / "out.jsonl"
    tracebacks = RowTracebacks(str(output), said.append)
    context = RowContext(id=0, index=0, line="line 1")
    for number in range(20_000):
        traceback = f"Traceback …\n{'x' * 4000}\nKeyError: {number // 2}"
        tracebacks.add(failed(context, RowError("internal_error", "reading failed", traceback)))
    size = (tmp_path / "out.jsonl.traceback.txt").stat().st_size
    assert 200_000 < size < 400_000
    assert len(said) == 1


def test_an_assertion_without_a_message_says_where_it_failed() -> None:
    """Nothing else of it may reach those who report it."""
    failing = compile("\nassert False", "/src/nvcli/engine/scheduler.py", "exec")
    with pytest.raises(AssertionError) as caught:
        exec(failing)
    assert first_line(caught.value) == "AssertionError at scheduler.py:2"
    assert first_line(ValueError()) == "ValueError"
