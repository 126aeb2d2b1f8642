"""A run that ends early says one line, keeps the traceback in a file, and tells its user what to type."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest

from nvcli.errors import CapacityError, WorkerError
from nvcli.job.own_files import manifest_path, rows_path
from nvcli.job.run.early_end import Interrupts, keep_traceback, next_steps, resume_hint

FAILURE = WorkerError("rank 1 failed at step 5: KeyError: 7", "Traceback (most recent call last):\n  …\nKeyError: 7\n")


def test_errors_without_a_traceback_stay_as_they_are() -> None:
    for error in (CapacityError("too large"), WorkerError("rank 0 was killed")):
        assert keep_traceback(error, "out.jsonl") is error


def test_it_is_added_to_a_file_beside_the_output(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    path = tmp_path / "out.jsonl.traceback.txt"
    kept = keep_traceback(FAILURE, str(output))
    assert isinstance(kept, WorkerError)
    assert str(kept) == f"rank 1 failed at step 5: KeyError: 7 (traceback: {path})"
    assert keep_traceback(kept, str(output)) is kept
    keep_traceback(FAILURE, str(output))
    text = path.read_text()
    assert text.count("rank 1 failed at step 5: KeyError: 7\nTraceback (most recent call last):") == 2
    assert "torch" in text


@pytest.mark.parametrize("output", ["-", "/nowhere/out.jsonl", None])
def test_elsewhere_it_is_a_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str | None) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    match = re.search(r"\(traceback: (.*)\)$", str(keep_traceback(FAILURE, output)))
    assert match is not None
    assert "KeyError: 7\n" in Path(match[1]).read_text()
    assert Path(match[1]).parent == tmp_path


def test_a_signal_ends_a_read_that_may_block_and_waits_elsewhere() -> None:
    blocked, other_end = os.pipe()
    with Interrupts() as interrupts:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(KeyboardInterrupt), interrupts.at_once():
            os.read(blocked, 1)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        with pytest.raises(KeyboardInterrupt), interrupts.at_once():
            pytest.fail("it began after a signal")
    os.close(blocked)
    os.close(other_end)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "my in.jsonl").touch()
    return tmp_path / "my in.out.jsonl"


def hint(output: Path, *flags: str, has_begun: bool = True) -> str:
    source = str(output.with_name("my in.jsonl"))
    return resume_hint(["/bin/nvcli", "generate", source, *flags], inputs=[source], output=None, has_begun=has_begun)


def test_the_command_is_quoted_and_does_not_undo_what_it_did(output: Path) -> None:
    manifest_path(output).touch()
    assert hint(output).startswith("nothing was answered yet; start again with")
    output.write_text("row\n")
    command = f"nvcli generate '{output.parent}/my in.jsonl' -m demo"
    for flags in ((), ("--overwrite",), ("--retry-errors",)):
        assert hint(output, "-m", "demo", *flags) == (
            f"the rows answered so far are in {output}; continue with:\n  {command}"
        )


def test_rows_of_a_table_that_is_not_made_yet_are_beside_it(output: Path) -> None:
    table = output.with_suffix(".parquet")
    manifest_path(table).touch()
    rows_path(table).write_text("row\n")
    said = resume_hint(["nvcli"], inputs=["in.jsonl"], output=str(table), has_begun=True)
    assert said.startswith(f"the rows answered so far are in {rows_path(table)}; continue with:")


def test_an_output_that_was_not_overwritten_yet_is_still_to_be(output: Path) -> None:
    manifest_path(output).touch()
    text = hint(output, "--overwrite", has_begun=False)
    assert text.startswith("nothing was answered yet; start again with:\n  nvcli generate ")
    assert text.endswith(" --overwrite")


def test_what_cannot_be_continued(output: Path) -> None:
    assert hint(output).startswith("nothing was answered yet; start again with")
    output.write_text("row\n")
    assert "cannot be continued, because its input was not a file" in hint(output)
    for name in ("-", None):  # rows from standard input go to standard output
        streamed = resume_hint(["nvcli"], inputs=["-"], output=name, has_begun=False)
        assert "standard output cannot be continued" in streamed
    missing = str(output.with_name("no*.jsonl"))
    assert resume_hint(["nvcli"], inputs=[missing], output=None, has_begun=False) == "nothing was answered yet"


def test_the_next_command_fits_what_happened(output: Path) -> None:
    argv = ["/bin/nvcli", "generate", "in.jsonl", "--retry-errors", "--overwrite", "-m", "demo"]
    shown = f"nvcli show '{output}'"
    assert next_steps(argv, output=str(output), errors=[]) == {}  # there is no file
    output.write_text("row\n")
    manifest_path(output).touch()
    assert list(next_steps(argv, output=str(output), errors=[])) == [shown]
    update = "nvcli generate in.jsonl -m demo --update"
    assert list(next_steps(argv, output=str(output), errors=["prompt_too_long"])) == [f"{shown} --errors", update]
    steps = next_steps(argv, output=str(output), errors=["prompt_too_long", "kv_cache_too_small"])
    assert list(steps) == [f"{shown} --errors", "nvcli generate in.jsonl -m demo --retry-errors", update]
    manifest_path(output).unlink()  # an output that cannot be continued
    assert list(next_steps(argv, output=str(output), errors=["aborted"])) == [f"{shown} --errors"]
    assert next_steps(argv, output="-", errors=["aborted"]) == {}
