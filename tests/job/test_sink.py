"""Syncing happens often, in the background, and its failures are told."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from nvcli.errors import OutputError
from nvcli.job.output.sink import Sink
from nvcli.job.output.writer import ResultWriter
from output_jobs import result_of


def open_sink(path: Path) -> Sink:
    return Sink(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), str(path))


def test_a_slow_disk_holds_up_no_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    synced: list[int] = []

    def slow(fd: int) -> None:
        go_on.wait(20)
        synced.append(os.fstat(fd).st_size)

    monkeypatch.setattr(os, "fsync", slow)
    sink = open_sink(tmp_path / "out")
    started = time.monotonic()
    for _ in range(100):
        sink.write(b"x" * 10)
        sink.sync()
    assert time.monotonic() - started < 5
    assert synced == []
    go_on.set()
    sink.close()
    assert synced[-1] == 1000  # the last one covers all
    assert len(synced) <= 4


def test_rows_are_synced_within_the_time_that_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    unsynced_since: list[float] = []
    late: list[float] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        fsync(fd)
        if unsynced_since:
            late.append(time.monotonic() - unsynced_since.pop())

    monkeypatch.setattr(os, "fsync", watched)
    writer = ResultWriter(open_sink(path), sync_seconds=0.4)
    for index in range(4):
        unsynced_since.append(time.monotonic())
        writer.write([result_of(index)])
        deadline = time.monotonic() + 10
        while unsynced_since and time.monotonic() < deadline:
            writer.tick()
            time.sleep(0.01)
    writer.close()
    assert len(late) == 4
    assert min(late) > 0.2  # many rows share a sync
    assert max(late) < 1.0


def test_a_failed_sync_ends_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def broken(fd: int) -> None:
        failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    sink = open_sink(tmp_path / "out")
    sink.write(b"x")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        sink.sync()
        assert failed.wait(10)
        time.sleep(0.05)
        with pytest.raises(OutputError, match="Input/output error"):
            sink.write(b"x")
        with pytest.raises(OutputError, match="Input/output error"):
            sink.close()
    sink.close()


def test_a_pipe_that_does_not_wait_is_waited_for() -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    data = b"x" * 1_000_000
    sink = Sink(write_end, "pipe")
    writer = threading.Thread(target=lambda: (sink.write(data), sink.close()))
    writer.start()
    with open(read_end, "rb") as pipe:
        assert pipe.read() == data
    writer.join()
