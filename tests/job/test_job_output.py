"""An output is continued by the same job alone, from whatever a crash left of it, and comes out as if never cut."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from combinations import full
from nvcli.core.config_types import Order
from nvcli.errors import ConfigError, OutputError, WorkerError
from nvcli.job.job import RowForm
from nvcli.job.output.job_output import JobOutput
from nvcli.job.output.manifest import save_manifest
from nvcli.job.output.output_scan import scan_output
from nvcli.job.own_files import manifest_path, own_files, rows_path, temporary_files
from nvcli.job.rows.output_row import read_output_row
from nvcli.job.run.early_end import keep_traceback
from output_jobs import FAILING, JOB, open_job, plain_bytes, rows_of, write

NAMES = ["out.jsonl", "out.jsonl.gz", "out.jsonl.zst"]
COUNT = 9


def sorted_lines(path: Path) -> list[bytes]:
    return sorted(plain_bytes(path).splitlines())


@pytest.mark.parametrize("stride", [full(1), 4])
@pytest.mark.parametrize(("name", "form"), [*((name, RowForm.NATIVE) for name in NAMES), ("out.jsonl", RowForm.CHAT)])
def test_a_file_cut_at_any_byte_is_finished_as_if_never_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: RowForm, stride: int
) -> None:
    """The first and the last bytes, those around the ends of lines, and some of the others."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # a thousand jobs would wait for the disk
    whole = tmp_path / f"whole.{name}"
    write(whole, range(3), failing=(1,), form=form, finish=True)
    path = tmp_path / name
    data, lines, manifest = whole.read_bytes(), sorted_lines(whole), msgspec.json.encode(JOB)
    ends = [0, len(data), *(match.end() for match in re.finditer(b"\n", data))]
    sizes = {end + beside for end in ends for beside in (-2, -1, 0, 1)} | {*range(0, len(data), stride)}
    for size in sorted(sizes & {*range(len(data) + 1)}):
        path.write_bytes(data[:size])
        manifest_path(path).write_bytes(manifest)
        write(path, range(3), failing=(1,), form=form, finish=True)
        assert sorted_lines(path) == lines


@pytest.mark.parametrize("name", NAMES)
def test_what_was_sound_before_the_cut_is_kept(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write(path, range(5))
    os.truncate(path, path.stat().st_size - 1)
    output = write(path, [])
    assert output.answered.all.count == 4
    assert [row["index"] for row in rows_of(path)] == [0, 1, 2, 3]
    assert any("cut off" in note for note in output.notes)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(0, 900),
    garbage=st.binary(max_size=80) | st.integers(0, 5000).map(bytes),
    name=st.sampled_from(NAMES),
)
def test_garbage_for_an_unsynced_tail(tmp_path: Path, size: int, garbage: bytes, name: str) -> None:
    path = tmp_path / name
    path.unlink(missing_ok=True)
    manifest_path(path).unlink(missing_ok=True)
    write(path, range(5))
    path.write_bytes(path.read_bytes()[:size] + garbage)
    write(path, range(COUNT), finish=True)
    assert sorted(row["index"] for row in rows_of(path)) == list(range(COUNT))


def test_a_damaged_line_in_the_middle_costs_its_own_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, range(COUNT))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = bytes(len(lines[2]) - 1) + b"\n"
    lines[5] = lines[6]
    path.write_bytes(b"".join(lines))
    output = write(path, range(COUNT))
    assert [index for index in range(COUNT) if index not in output.answered.all] == [2, 5]
    assert sorted(row["index"] for row in rows_of(path)) == list(range(COUNT))


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"[]", b'{"index": -1}', b'{"index": 1', b'{"index": "1"}', b'{"index": 1, "x": "\0"}', b"\xff",
     b'{"id": "batch_req_"}', b'{"id": "batch_req_-1"}', b'{"id": "other"}', b'{"index": 1e400}'],
)  # fmt: skip
def test_lines_that_are_no_rows(line: bytes) -> None:
    assert read_output_row(line) is None


@given(st.binary(max_size=200))
def test_any_file_can_be_scanned(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    for name in NAMES:
        path = tmp_path_factory.getbasetemp() / name
        path.write_bytes(data)
        assert scan_output(path).sound_bytes <= len(data)


def test_what_the_shell_has_opened_is_written_where_its_other_commands_write(tmp_path: Path) -> None:
    path = tmp_path / "all"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"before\n")
    output = open_job(Path(f"/dev/fd/{fd}"))
    output.sink.write(b"row\n")
    output.close()
    os.write(fd, b"after\n")
    os.close(fd)
    assert path.read_bytes() == b"before\nrow\nafter\n"


def test_another_job_is_refused_with_a_line_for_each_difference(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, range(3))
    before = path.read_bytes()
    other = msgspec.structs.replace(
        JOB, facts={"seed": 1, "dtype": "float32", "sampling.stop": '["a"]'}, inputs=[("in.jsonl", "6 bytes")]
    )
    with pytest.raises(ConfigError) as error:
        open_job(path, other)
    way_back = " (to continue as it began: --set 'sampling.stop=[]', and no flag for it)"
    told = f'  seed: 0 → 1\n  sampling.stop: not set → ["a"]{way_back}\n  input in.jsonl: 5 bytes → 6 bytes\n'
    assert told in str(error.value)
    assert "--overwrite" in str(error.value)
    more = msgspec.structs.replace(JOB, inputs=[*JOB.inputs, ("b.jsonl", "5 bytes")])
    with pytest.raises(ConfigError, match=r"inputs: in\.jsonl → in\.jsonl, b\.jsonl"):
        open_job(path, more)
    assert path.read_bytes() == before
    facts = {**JOB.facts, "sampling.stop": "[]"}
    moved = msgspec.structs.replace(JOB, created=5, model="elsewhere", facts=facts, inputs=[("moved.jsonl", "5 bytes")])
    named = msgspec.structs.replace(JOB, hub_id="a/model")
    open_job(path, named).close()  # the same weights, downloaded
    save_manifest(path, named)
    with pytest.raises(ConfigError, match=r"\n  model: a/model → a/other\n"):
        open_job(path, msgspec.structs.replace(JOB, hub_id="a/other"))
    output = open_job(path, moved)
    assert (output.form.created, output.form.model) == (1000, "m")  # as the first run had them
    output.close()


@pytest.mark.parametrize(
    "manifest",
    [None, b"", b"{", b'{"version": 99}', b'{"version": 2, "facts": []}', b'{"x":' * 100_000, b'{"version": 1e999}'],
)
def test_an_output_without_a_usable_manifest_is_refused(tmp_path: Path, manifest: bytes | None) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("precious\n")
    if manifest is not None:
        manifest_path(path).write_bytes(manifest)
    with pytest.raises(ConfigError, match="--overwrite"):
        open_job(path)
    assert path.read_text() == "precious\n"
    write(path, range(2), overwrite=True)
    assert len(rows_of(path)) == 2


def test_an_overwritten_output_is_emptied_by_the_first_write_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, [0, 1, 2], finish=True)
    before, manifest = path.read_bytes(), manifest_path(path).read_bytes()
    open_job(path, overwrite=True).close()
    assert (path.read_bytes(), manifest_path(path).read_bytes()) == (before, manifest)
    write(path, [1], overwrite=True)
    assert [row["index"] for row in rows_of(path)] == [1]
    write(path, [], finish=True, overwrite=True)  # a job without rows
    assert path.read_bytes() == b""


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_new_output_says_when_it_has_begun(tmp_path: Path, name: str) -> None:
    begun: list[list[bytes]] = []
    path = tmp_path / name

    def look() -> None:
        begun.append([rows_path(path).read_bytes(), manifest_path(path).read_bytes()])

    write(path, [0], failing=[0], finish=True)
    old = manifest_path(path).read_bytes()
    write(path, [0, 1], on_begin=look)  # continued
    open_job(path, overwrite=True, on_begin=look).close()
    assert begun == []
    write(path, [0, 1], overwrite=True, on_begin=look)
    assert [(rows, manifest == old) for rows, manifest in begun] == [(b"", False)]


def test_a_new_output_that_got_nothing_is_not_left_behind(tmp_path: Path) -> None:
    output = open_job(tmp_path / "out.jsonl")
    output.close()
    output.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [*NAMES, "out.parquet"])
def test_what_a_killed_run_left_is_removed_by_the_next_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write(path, range(3), finish=True)
    before = sorted(tmp_path.iterdir())
    for leftover in temporary_files(path):
        leftover.write_text("half")
    assert len(list(tmp_path.iterdir())) > len(before)
    write(path, range(3), finish=True)  # there is nothing to do
    assert sorted(tmp_path.iterdir()) == before
    for leftover in temporary_files(path):
        leftover.write_text("half")
    write(path, range(4), finish=True, retry_errors=True)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
def test_links_to_other_files_are_not_written_through(tmp_path: Path, name: str) -> None:
    """They may have come after the output was looked at."""
    path, precious = tmp_path / "folder" / name, tmp_path / "precious"
    for place in own_files(path)[1:]:
        for is_continued in (False, True):
            path.parent.mkdir()
            precious.write_text("precious")
            if is_continued:
                write(path, range(4), failing=[3])
            place.unlink(missing_ok=True)
            place.symlink_to(precious)
            with contextlib.suppress(ConfigError, OutputError):
                write(path, range(9), finish=True, retry_errors=True)
            keep_traceback(WorkerError("it failed", "a traceback"), str(path))
            assert precious.read_text() == "precious", (place.name, is_continued)
            shutil.rmtree(path.parent)


def test_a_run_that_was_killed_after_its_last_write_leaves_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    write(path, range(3), failing=(), finish=True)
    before = sorted(tmp_path.iterdir())
    (tmp_path / "out.parquet.rows.jsonl").write_text("half")
    assert open_and_close(path).finished is not None
    assert sorted(tmp_path.iterdir()) == before
    write(path, range(COUNT), finish=True, overwrite=True)  # with failed rows, which may be tried again
    before = sorted(tmp_path.iterdir())
    assert open_and_close(path).finished is not None
    assert sorted(tmp_path.iterdir()) == before


def open_and_close(path: Path) -> JobOutput:
    output = open_job(path)
    output.close()
    return output


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, range(COUNT))
    first = open_job(path, retry_errors=True)  # which replaces the file
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="another run is writing"):
            open_job(path, overwrite=overwrite)
    first.close()
    open_job(path).close()


def test_a_finished_output_says_so_until_it_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, range(COUNT), finish=True)
    output = open_job(path)
    output.close()
    assert output.finished is not None
    assert (output.finished.rows, output.finished.errors) == (COUNT, {"prompt_too_long": 2})
    os.truncate(path, path.stat().st_size - 1)
    output = open_job(path)
    output.close()
    assert output.finished is None
    assert output.answered.all.count == COUNT - 1


def test_a_limit_that_was_reached_is_no_end_for_a_higher_one(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = open_job(path, limit=2)
    output.sink.start()
    output.finish(rows=2, errors={}, rows_read=2, all_read=False)
    output.close()
    path.write_text("xx")  # not empty
    manifest = msgspec.json.decode(manifest_path(path).read_bytes())
    manifest["finished"]["output_bytes"] = 2
    manifest_path(path).write_bytes(msgspec.json.encode(manifest))
    for limit, is_finished in ((1, True), (2, True), (3, False), (None, False)):
        output = open_job(path, limit=limit)
        output.close()
        assert (output.finished is not None) == is_finished


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("order", ["completion", "input"])
def test_failed_rows_are_tried_again_and_the_others_kept(tmp_path: Path, name: str, order: Order) -> None:
    path, whole = tmp_path / name, tmp_path / f"whole.{name}"
    write(whole, range(COUNT), order=order, failing=(), finish=True)
    write(path, range(COUNT), order=order, finish=True)
    output = write(path, range(COUNT), order=order, failing=(), finish=True, retry_errors=True)
    assert output.answered.all.count == COUNT - len(FAILING)
    assert [index for index in range(COUNT) if index not in output.answered.all] == sorted(FAILING)
    if order == "input":
        assert plain_bytes(path) == plain_bytes(whole)
    assert sorted_lines(path) == sorted_lines(whole)
    again = open_job(path, order=order, retry_errors=True)
    again.close()
    assert again.finished is not None
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_rows_tried_again_are_put_into_order_even_if_that_was_cut_short(tmp_path: Path) -> None:
    path, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    write(whole, range(COUNT), order="input", failing=(), finish=True)
    write(path, range(COUNT), order="input", finish=True)
    write(path, [3], order="input", failing=(), retry_errors=True)
    write(path, range(COUNT), order="input", failing=(), finish=True)
    assert path.read_bytes() == whole.read_bytes()


def test_a_limit_is_not_reached_by_rows_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, [7, 8])
    write(path, [0], finish=True, all_read=False)
    for limit, is_finished in ((1, True), (3, False)):
        output = open_job(path, limit=limit)
        output.close()
        assert (output.finished is not None) == is_finished


@pytest.mark.parametrize("name", NAMES)
def test_rows_behind_a_limit_are_kept_when_rows_are_put_into_order(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write(path, range(COUNT), order="input", finish=True)
    write(path, range(2), order="input", finish=True, all_read=False, retry_errors=True, limit=2)
    assert [row["index"] for row in rows_of(path)] == [0, 1, 2, 5, 6, 7, 8]
    write(path, range(COUNT), order="input", failing=(), finish=True)
    assert [row["index"] for row in rows_of(path)] == list(range(COUNT))


def test_input_order_continues_where_it_was(tmp_path: Path) -> None:
    path, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    write(whole, range(COUNT), order="input", finish=True)
    write(path, [2, 0, 4, 1, 8], order="input")  # 4 and 8 wait for 3, and are lost
    assert [row["index"] for row in rows_of(path)] == [0, 1, 2]
    write(path, [8, 3, 7, 4, 6, 5], order="input", finish=True)
    assert path.read_bytes() == whole.read_bytes()


def test_rows_that_cannot_be_read_again_leave_no_manifest(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, range(2), finish=True)
    with pytest.raises(ConfigError, match="standard input or a pipe"):
        open_job(path, can_continue=False)
    write(path, range(3), finish=True, can_continue=False, overwrite=True)
    assert not manifest_path(path).exists()
    with pytest.raises(ConfigError, match=r"there is no out\.jsonl\.manifest\.json"):
        open_job(path)


def test_a_full_disk_leaves_whole_rows_that_can_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    os_write = os.write

    def half_and_no_more(fd: int, data: memoryview) -> int:
        if path.stat().st_size > 400:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os_write(fd, data[: max(1, len(data) // 2)])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half_and_no_more)
        with pytest.raises(OutputError, match=r"out\.jsonl cannot be written any further: No space left"):
            write(path, range(COUNT))
    rows = rows_of(path)
    assert 0 < len(rows) < COUNT
    write(path, range(COUNT), finish=True)
    assert [row["index"] for row in rows_of(path)] == list(range(COUNT))


@pytest.mark.parametrize("name", ["locked_file._open_locked", "digest_file.open_unlinked", "manifest.create_anew"])
def test_an_output_that_cannot_be_begun_says_which_file_could_not_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def full(path: Path, *flags: int, mode: int = 0) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(f"nvcli.job.output.{name}", full)
        with pytest.raises(OutputError, match=r"out\.jsonl cannot be written: (/.*out\.jsonl\..*: )?No space left"):
            write(tmp_path / "out.jsonl", range(3))
    assert not (tmp_path / "out.jsonl").exists()
    write(tmp_path / "out.jsonl", range(3), finish=True)
    assert len(rows_of(tmp_path / "out.jsonl")) == 3


def test_a_full_disk_leaves_no_half_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("nvcli.job.output.manifest.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_manifest(tmp_path / "out.jsonl", JOB)
    assert list(tmp_path.iterdir()) == []
