"""A failure is one line for the user; its traceback is in the file that the line names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nvcli.errors import CapacityError, WorkerError
from nvcli.job_run.early_end import keep_traceback

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
