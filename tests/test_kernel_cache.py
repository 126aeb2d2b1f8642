"""A folder of compiled kernels that cannot be written to is named, and other errors are left as they are."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from nvcli.core.system.kernel_cache import kernel_cache_error
from nvcli.worker.executor import worker


class Control:
    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def read_only(path: Path) -> OSError:
    return OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def test_a_rank_names_the_folder_and_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wrapped = RuntimeError("a kernel cannot be compiled")
    wrapped.__cause__ = read_only(tmp_path / "KEY")
    control = Control()
    for error in (wrapped.__cause__, wrapped):
        worker._report_failure(error, control)  # type: ignore[arg-type]
    for failure in control.sent:
        assert isinstance(failure, worker.RankFailed)
        assert (failure.kind, failure.traceback) == ("ConfigError", "")
        assert f"{tmp_path}: Read-only file system: {tmp_path}/KEY; set TRITON_CACHE_DIR" in failure.message


def test_other_errors_are_no_errors_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for error in (read_only(tmp_path / "other"), OSError(errno.EROFS, "x"), OSError(5, "x", 3), ValueError("x")):
        assert kernel_cache_error(error) is None
