"""A file beside the output that names the run writing to it, for file systems where locks do not work.

The kernel's lock on the output (`locked_file`) goes with its process and needs no file. But some network file systems
grant such a lock to everybody, or to one run on each host. There this file tells two runs apart. It names the process
and host that made it, so that the file of a killed process can be told from that of a running one.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from pathlib import Path

import msgspec

from nvcli.errors import ConfigError

_LOCAL_TYPES = frozenset((
    "bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "ntfs3", "overlay", "ramfs", "reiserfs",
    "tmpfs", "vfat", "xfs", "zfs",
))  # fmt: skip
"""Types of local file systems; any other may be a network file system."""
_MAX_TRIES = 20
_TRY_SECONDS = 0.05
"""Seconds between two looks at a file that is being written or taken over."""


class LockHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds an output, as its lock file describes it."""

    host: str
    machine: str
    """The machine's id; empty where it has none, as in many containers."""
    boot: str
    """The id of the running kernel, which changes with each boot."""
    pid_namespace: str
    """The namespace within which process ids are comparable."""
    pid: int
    started: str
    """Start time of the process in clock ticks, which tells it from a later process with the same id."""
    since: str
    """When the output was locked, for messages."""


class LockFile:
    """A lock file of this process. `release` removes it."""

    def __init__(self, path: Path, output: Path, *, locks_work: bool, is_shared: bool) -> None:
        """Create the file, or take over that of a process that is gone. Raises ConfigError if another run holds it.

        `locks_work` says that this process holds the output's lock, and that the kernel refuses it to others on this
        host. `is_shared` says that other hosts may use the file system too. Where the folder takes no new files there
        is no lock file. Raises OSError for other failures.
        """
        self._path = path
        self._output = output
        self._locks_work = locks_work
        self._is_shared = is_shared
        self._data = msgspec.json.encode(this_process())
        self._is_held = False
        was_taken_over = False
        for _ in range(_MAX_TRIES):
            try:
                _create(path, self._data)
            except PermissionError:
                return
            except FileExistsError:
                was_taken_over = self._remove_if_stale() or was_taken_over
                continue
            self._is_held = True
            break
        if was_taken_over and not locks_work:
            time.sleep(_TRY_SECONDS)  # another run may have seen the same stale file: the last one to replace it stays
        if not self._is_held or _read(path) != self._data:
            self._is_held = False
            raise _held_by_another(path, output, _holder(_read(path) or b""))

    def release(self) -> None:
        """Remove the file unless another run has replaced it. Idempotent.

        One that cannot be removed is taken over by the next run, as that of a process which is gone.
        """
        if self._is_held:
            self._is_held = False
            with contextlib.suppress(OSError):
                if _read(self._path) == self._data:
                    self._path.unlink(missing_ok=True)

    def _remove_if_stale(self) -> bool:
        """Remove a lock file whose process is gone, and return True; return False to try again.

        Raises ConfigError where the process runs, or where nobody can say whether it does.
        """
        data = _read(self._path)
        if data is None:
            return False  # it was removed meanwhile
        holder = _holder(data)
        if holder is None:
            if self._is_shared or not self._locks_work:
                time.sleep(_TRY_SECONDS)  # its process is just writing it, or died then
            if not self._locks_work or _read(self._path) != data:
                return False
        elif not self._is_gone(holder, this_process()):
            raise _held_by_another(self._path, self._output, holder)
        self._path.unlink(missing_ok=True)
        return True

    def _is_gone(self, holder: LockHolder, ours: LockHolder) -> bool:
        if holder.boot != ours.boot:
            was_started_anew = bool(ours.machine) and (holder.host, holder.machine) == (ours.host, ours.machine)
            return was_started_anew or (self._locks_work and not self._is_shared)
        if holder.pid_namespace == ours.pid_namespace:
            return not _is_running(holder)
        return self._locks_work  # its process, in another container, would still have the output's lock


def this_process() -> LockHolder:
    """Describe the current process."""
    pid = os.getpid()
    return LockHolder(
        host=socket.gethostname(),
        machine=_first_line("/etc/machine-id"),
        boot=_first_line("/proc/sys/kernel/random/boot_id"),
        pid_namespace=str(os.stat("/proc/self/ns/pid").st_ino),
        pid=pid,
        started=_start_time(pid) or "",
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
    )


def _create(path: Path, data: bytes) -> None:
    """Create a file that must not exist yet. Raises FileExistsError, and other OSErrors."""
    with path.open("xb") as file:
        try:
            file.write(data)
            file.flush()
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _is_running(holder: LockHolder) -> bool:
    started = _start_time(holder.pid)
    if started is not None:
        return started == holder.started
    try:
        os.kill(holder.pid, 0)
    except PermissionError:
        return True  # another user's, which /proc does not show
    except ProcessLookupError:
        return False
    return False  # it has ended, and its parent has not reaped it yet


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks; None if it has ended or is hidden."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return None if fields[0] in "ZX" else fields[19]


def _held_by_another(path: Path, output: Path, holder: LockHolder | None) -> ConfigError:
    who = f"process {holder.pid} on {holder.host}, since {holder.since}" if holder else "an unknown process"
    return ConfigError(
        f"another run is writing to the output {output} ({who}); wait for it to end, or name another with -o; "
        f"if no such run is left, remove {path}"
    )


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _holder(data: bytes) -> LockHolder | None:
    try:
        return msgspec.json.decode(data, type=LockHolder)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _first_line(name: str) -> str:
    try:
        return Path(name).read_text().strip()
    except OSError:
        return ""


def is_on_local_disk(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Tell whether a file is on a local file system. If unknown, it is not.

    `mounts` has the form of proc_pid_mountinfo(5): the mount point is the fifth field, the type follows a dash.
    """
    folder = path.resolve().parent
    found, kind = "", ""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        if folder.is_relative_to(mount) and len(mount) >= len(found):  # a later mount hides an earlier one
            found, kind = mount, after.split()[0]
    return kind in _LOCAL_TYPES
