"""Two runs on one output are told apart where the file system's locks do nothing, and a dead run keeps nobody away."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from nvcli.errors import ConfigError
from nvcli.job.output import lock_file, locked_file
from nvcli.job.output.lock_file import LockFile, LockHolder, is_on_local_disk, this_process
from nvcli.job.own_files import lock_path
from output_jobs import open_job, rows_of, write

NAMES = ["out.jsonl", "out.jsonl.gz", "out.parquet"]
OTHER_HOST = {"host": "elsewhere", "machine": "m", "boot": "b"}


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system grants every lock to everybody, and nobody waits long."""
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    monkeypatch.setattr(lock_file, "_TRY_SECONDS", 0.001)


def leave_lock(path: Path, **changes: object) -> None:
    """What a run leaves that was killed; with `changes`, one on another host or in another container."""
    lock_path(path).write_bytes(msgspec.json.encode(msgspec.structs.replace(this_process(), **changes)))


def ended_process() -> LockHolder:
    """A process that was killed and that its parent has not waited for yet."""
    code = "import sys; from nvcli.job.output.lock_file import *; import msgspec; "
    code += "print(msgspec.json.encode(this_process()).decode(), flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        holder = msgspec.json.decode(process.stdout.readline(), type=LockHolder)
        assert lock_file._is_running(holder)
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not lock_file._is_running(holder)
    return holder


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("name", NAMES)
def test_two_runs_at_once_are_refused_without_locks(tmp_path: Path, name: str) -> None:
    path, link = tmp_path / name, tmp_path / f"link.{name}"
    link.symlink_to(path)
    first = open_job(path)
    for overwrite in (False, True):
        for other in (path, link):
            with pytest.raises(ConfigError, match=rf"another run is writing .*process {os.getpid()} on .* remove"):
                open_job(other, overwrite=overwrite)
    first.close()
    write(path, range(3))
    assert not lock_path(path).exists()
    open_job(path).close()


@pytest.mark.usefixtures("no_locks")
def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    lock_path(path).write_bytes(msgspec.json.encode(ended_process()))
    write(path, range(2))
    leave_lock(path, started="1")  # another process has its id now
    write(path, range(4))
    monkeypatch.setattr(locked_file, "is_on_local_disk", lambda path: False)
    leave_lock(path, boot="an earlier one", machine="this", pid=1)
    with pytest.raises(ConfigError, match="another run is writing"):
        open_job(path)
    machine = msgspec.structs.replace(this_process(), machine="this")
    monkeypatch.setattr(lock_file, "this_process", lambda: machine)
    write(path, range(5))  # the machine was started anew since
    assert [row["index"] for row in rows_of(path)] == list(range(5))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "out.jsonl",
        "out.jsonl.digests",
        "out.jsonl.manifest.json",
    ]


@pytest.mark.parametrize("locks_work", [True, False])
def test_a_run_on_another_host_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks_work: bool
) -> None:
    path = tmp_path / "out.jsonl"
    write(path, range(2))
    monkeypatch.setattr(locked_file, "is_on_local_disk", lambda path: False)
    if not locks_work:
        monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    leave_lock(path, **OTHER_HOST)
    before = lock_path(path).read_bytes()
    with pytest.raises(ConfigError, match=r"process \d+ on elsewhere, since .* remove .*/\.out\.jsonl\.lock$"):
        open_job(path, overwrite=True)
    assert lock_path(path).read_bytes() == before
    assert len(rows_of(path)) == 2
    lock_path(path).unlink()  # the way out
    open_job(path).close()


def test_on_a_local_disk_nothing_is_left_of_an_earlier_start_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    leave_lock(path, **OTHER_HOST)
    monkeypatch.setattr(locked_file, "is_on_local_disk", lambda path: True)
    open_job(path).close()
    assert not lock_path(path).exists()


@pytest.mark.parametrize(
    ("name", "is_local"),
    [("/a", True), ("/nfs/a", False), ("/nfs/local/deep/a", True), ("/my disk/a", False), ("/nfsx/a", True)],
)
def test_the_innermost_mount_says_whether_a_file_is_local(tmp_path: Path, name: str, is_local: bool) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 0:5 / / rw - ext4 /dev/a rw\n22 21 0:6 / /nfs rw,x shared:1 - nfs4 host:/ rw\n"
        "23 22 0:7 / /nfs/local rw - xfs /dev/b rw\n24 21 0:8 / /my\\040disk rw - lustre x rw\n"
    )
    assert is_on_local_disk(Path(name), mounts) == is_local
    assert not is_on_local_disk(Path(name), tmp_path / "none")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", None])
def test_what_nobody_can_judge_is_left_to_the_locks_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes | None
) -> None:
    """A torn file after a power loss, or one of another container of this host (`data` None)."""
    path = tmp_path / "out.jsonl"

    def leave() -> None:
        if data is None:
            leave_lock(path, pid_namespace="1")
        else:
            lock_path(path).write_bytes(data)

    leave()
    open_job(path).close()
    leave()
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
    monkeypatch.setattr(lock_file, "_TRY_SECONDS", 0.001)
    with pytest.raises(ConfigError, match=r"another run is writing .* remove"):
        open_job(path)


def test_of_two_that_take_over_a_stale_file_the_last_one_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    leave_lock(path, started="1")

    def another_does_it_too(seconds: float) -> None:
        leave_lock(path, **OTHER_HOST)

    monkeypatch.setattr(lock_file.time, "sleep", another_does_it_too)
    with pytest.raises(ConfigError, match="on elsewhere"):
        LockFile(lock_path(path), path, locks_work=False, is_shared=True)
    assert b"elsewhere" in lock_path(path).read_bytes()


def test_where_nothing_can_be_made_beside_the_file_there_is_no_lock_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: Path, data: bytes) -> None:
        raise PermissionError

    monkeypatch.setattr(lock_file, "_create", forbidden)
    write(tmp_path / "out.jsonl", range(2))
    assert len(rows_of(tmp_path / "out.jsonl")) == 2
