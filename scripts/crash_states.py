"""Records the system calls that change a folder, and makes the folders that a power loss at each of them may leave.

The model is POSIX's: until a file is synced, any part of what was written to it may be lost, and what is lost may read
as zeros; until a folder is synced, each change of its names (a new file, a rename, a removal) may be lost or kept by
itself. What was synced stays.
"""

from __future__ import annotations

import builtins
import io
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

Folder = dict[str, bytes]
"""The files of a folder: their contents by name."""

_CALLS = (
    "open", "close", "write", "pwrite", "ftruncate", "truncate", "fchmod", "fsync", "fdatasync",
    "rename", "replace", "unlink", "remove", "link",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """The folder behind a system call. Files are numbered by inode."""

    call: str
    """The call behind which the power is lost."""
    synced_names: Mapping[str, int]
    """The folder's names when it was last synced."""
    changes: tuple[Mapping[str, int | None], ...]
    """Changes of names since then, oldest first; None: the name was removed. A rename changes two names at once."""
    synced: Mapping[int, bytes]
    """The contents of each file when it was last synced; a file that never was is not in it."""
    written: Mapping[int, bytes]
    """The contents of each file as the running system sees them."""
    untouched: Mapping[int, int]
    """The bytes at the start of each file that were neither cut off nor changed since it was last synced."""


class CallRecorder:
    """While entered, notes what the calls of this process do to a folder: `points` has a crash point for each change.

    The calls of `os` and of Python's files are seen as they are made; what a library in C writes is seen with the next
    of them. Calls are made one at a time, so that every crash point is a state that there was.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_calls = 0
        self.points: list[CrashPoint] = []
        self._real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in _CALLS}
        self._real_open = io.open
        self._lock = threading.RLock()
        self._folder_inode = os.stat(folder).st_ino
        self._kept_open: dict[int, int] = {}
        """A descriptor of each file that was seen, so that no later one gets its inode."""
        self._changes: list[dict[str, int | None]] = []
        self._names = self._list()
        self._synced_names = self._names
        self._synced = self._contents()
        self._untouched = {inode: len(data) for inode, data in self._synced.items()}

    def __enter__(self) -> CallRecorder:
        for name in _CALLS:
            setattr(os, name, partial(self._call, name))
        io.open = builtins.open = self._open  # type: ignore[assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name, function in self._real.items():
            setattr(os, name, function)
        io.open = builtins.open = self._real_open
        for fd in self._kept_open.values():
            os.close(fd)

    def _open(self, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            file = self._real_open(*arguments, **options)
            self._note("open", None)
            return file

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        with self._lock:
            inode = os.fstat(arguments[0]).st_ino if name in ("fsync", "fdatasync") else None
            result = self._real[name](*arguments, **options)
            self._note(name, inode)
            return result

    def _note(self, call: str, synced: int | None) -> None:
        """Take note of a call; `synced` is the inode that it synced."""
        names = self._list()
        if change := {
            name: names.get(name) for name in {*names, *self._names} if names.get(name) != self._names.get(name)
        }:
            self._changes.append(change)
            self._names = names
        if synced == self._folder_inode:
            self._synced_names, self._changes = names, []
        written = self._contents()
        if synced in written:
            self._synced = {**self._synced, synced: written[synced]}
        for inode, data in written.items():
            same = _num_equal(data, self._synced.get(inode, b""))
            self._untouched[inode] = same if inode == synced else min(self._untouched.get(inode, 0), same)
        self.num_calls += 1
        point = CrashPoint(call, self._synced_names, tuple(self._changes), self._synced, written, dict(self._untouched))
        if not self.points or _without_call(point) != _without_call(self.points[-1]):
            self.points.append(point)

    def _list(self) -> dict[str, int]:
        with os.scandir(self.folder) as entries:
            names = {entry.name: entry.inode() for entry in entries if entry.is_file(follow_symlinks=False)}
        for name, inode in names.items():
            if inode not in self._kept_open:
                self._kept_open[inode] = self._real["open"](self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        return names

    def _contents(self) -> dict[int, bytes]:
        return {inode: os.pread(fd, os.fstat(fd).st_size, 0) for inode, fd in self._kept_open.items()}


def crash_states(point: CrashPoint, rng: random.Random, *, num_random: int) -> Iterator[Folder]:
    """Yield folders that a power loss at this point may leave.

    The first ones are the extremes: nothing or everything of what was not synced is kept, of names and of contents.
    `num_random` others are chosen at random.
    """
    for keep_names in (False, True):
        for keep_contents in (False, True):
            names = _names_after(point, lambda keep=keep_names: keep)
            yield {
                name: (point.written if keep_contents else point.synced).get(inode, b"")
                for name, inode in names.items()
            }
    for _ in range(num_random):
        names = _names_after(point, lambda: rng.random() < 0.5)
        yield {
            name: _torn(point.synced.get(inode, b""), point.written[inode], point.untouched[inode], rng)
            for name, inode in names.items()
        }


def _names_after(point: CrashPoint, is_kept: Callable[[], bool]) -> dict[str, int]:
    names: dict[str, int | None] = dict(point.synced_names)
    for change in point.changes:
        if is_kept():
            names.update(change)
    return {name: inode for name, inode in names.items() if inode is not None}


def _torn(synced: bytes, written: bytes, untouched: int, rng: random.Random) -> bytes:
    """Return what a power loss may leave of a file that held `synced` and was then written to behind `untouched`."""
    if synced == written:
        return synced
    kind = rng.randrange(5)
    if kind == 0:
        return synced
    if kind == 1:
        return written
    cut, end = sorted(rng.randint(untouched, len(written)) for _ in range(2))
    if kind == 2:
        return written[:cut]
    if kind == 3:  # the new length is kept, and a part of the bytes is not
        return written[:cut] + bytes(end - cut) + written[end:]
    return written[:cut] + synced[cut:]  # pages of the old version and of the new one


def _num_equal(first: bytes, second: bytes) -> int:
    """Return how many bytes at the start of both are the same."""
    length = min(len(first), len(second))
    return next((place for place in range(length) if first[place] != second[place]), length)


def _without_call(point: CrashPoint) -> tuple[Any, ...]:
    return point.synced_names, point.changes, point.synced, point.written, point.untouched
