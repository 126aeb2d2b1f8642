"""What keeps a file from being written is named with the limit behind it."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from nvcli.core.system.file_limits import explain_failed_write, why_not_writable
from nvcli.errors import ConfigError
from nvcli.job.files import check_output
from nvcli.job.progress.status_file import SideFile
from nvcli.worker.executor.channel import ChannelSpec
from nvcli.worker.executor.rank_messages import StatusBoard


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files of 1,000 bytes at most, as with `ulimit -f`, where Python would keep compiled modules cut."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_limit_of_a_shell_is_named(tmp_path: Path, small_files: None) -> None:
    path = tmp_path / "out.jsonl"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="File too large") as caught:
        os.ftruncate(fd, 1001)
    os.close(fd)
    found = explain_failed_write(caught.value, path)
    assert found == (
        "File too large: this shell lets a program write files of at most 1,000 bytes (`ulimit -f`); raise it with: "
        "ulimit -f unlimited"
    )


def test_the_limit_holds_for_memory_that_processes_share(small_files: None) -> None:
    os.close(StatusBoard.create(1))
    for create in (lambda: ChannelSpec.create(1000, 1), lambda: StatusBoard.create(100)):
        with pytest.raises(
            ConfigError, match=r"1,000 bytes \(`ulimit -f`\), which also limits the memory that .* unlimited"
        ):
            create()


def test_a_file_system_without_inodes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{path}.digests")
    assert explain_failed_write(full, path) == f"{path}.digests: No space left on device"
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_files=5, f_favail=0))
    assert explain_failed_write(full, path).endswith(
        f": the file system of {tmp_path} has no free inode (`df -i`); remove files there"
    )


def test_a_read_only_file_system_is_told_from_a_lack_of_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_not_writable(tmp_path) == "no permission"
    assert why_not_writable(tmp_path / "none") == "No such file or directory"
    flags = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flags.f_flag | os.ST_RDONLY))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(
        ConfigError, match=r"out\.jsonl cannot be made in .*: its file system is mounted read-only; name"
    ):
        check_output([], str(tmp_path / "out.jsonl"))
    with pytest.raises(
        ConfigError, match=r"--report .*r\.html cannot be written in .*: its file system is mounted read-o"
    ):
        SideFile("--report", tmp_path / "r.html")
