"""Limits on this process's memory and cores, from Linux control groups, on which containers, services and batch jobs
are built.

Memory is read from both versions, cores only from version 2: version 1 has its files below `memory/`, version 2 at
the root. A container may see its group's path as the host does; then only the root exists, which is the
container's own group.

Sources: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_VMSTAT = Path("/proc/vmstat")
_NO_LIMIT = 1 << 60
"""Limits of version 1 from here on stand for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKills:
    """Number of processes that the kernel killed because memory ran out."""

    count: int
    where: str
    """Scope of the count, for messages: `this container or service`, or `this machine`."""


def container_limit(root: Path = _GROUPS, own: Path = _OWN_GROUPS) -> int | None:
    """Return the bytes of RAM that this process may use: the lowest limit of its groups; None without a limit."""
    return min((limit for _, limit in _limits(root, own)), default=None)


def container_cores(root: Path = _GROUPS, own: Path = _OWN_GROUPS) -> float | None:
    """Return the cores that this process may use at a time: the lowest limit of its groups; None without a limit."""
    found: list[float] = []
    for folder in _folders(root, own):
        with contextlib.suppress(OSError, ValueError):  # no such file, or `max` instead of a number
            quota, period = (folder / "cpu.max").read_text().split()
            found.append(int(quota) / int(period))
    return min(found, default=None)


def container_room(root: Path = _GROUPS, own: Path = _OWN_GROUPS) -> int | None:
    """Return the bytes of RAM that this process may still take within its groups' limits; None without a limit.

    Cached pages of files count as free: the kernel drops them before it kills.
    """
    return min((max(0, limit - _held_bytes(folder)) for folder, limit in _limits(root, own)), default=None)


def count_oom_kills(root: Path = _GROUPS, own: Path = _OWN_GROUPS, vmstat: Path = _VMSTAT) -> OomKills | None:
    """Count the out-of-memory kills in this process's group, else on the machine; None: unknown."""
    for folder in _folders(root, own):
        for name in ("memory.events", "memory.oom_control"):
            if (count := _read_fields(folder / name).get("oom_kill")) is not None:
                return OomKills(count=count, where="this container or service")
    count = _read_fields(vmstat).get("oom_kill")
    return None if count is None else OomKills(count=count, where="this machine")


def _limits(root: Path, own: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder and the limit in bytes of each enclosing group that has one."""
    for folder in _folders(root, own):
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (limit := _read_number(folder / name)) is not None and limit < _NO_LIMIT:
                yield folder, limit


def _held_bytes(folder: Path) -> int:
    """Return the bytes that a group holds and the kernel cannot reclaim."""
    held = _read_number(folder / "memory.current") or _read_number(folder / "memory.usage_in_bytes") or 0
    fields = _read_fields(folder / "memory.stat")
    prefix = "total_" if "total_inactive_file" in fields else ""  # version 1 counts nested groups separately
    return held - fields.get(f"{prefix}inactive_file", 0) - fields.get(f"{prefix}active_file", 0)


def _folders(root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of the enclosing groups, innermost first."""
    groups: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            groups[controllers] = Path(path.lstrip("/"))
    for base, group in ((root / "memory", groups.get("memory", Path())), (root, groups.get("", Path()))):
        for part in (group, *group.parents):
            if (base / part).is_dir():
                yield base / part


def _read_number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # `max` is no limit


def _read_fields(file: Path) -> dict[str, int]:
    """Read lines with a name and a number; empty if there is no such file."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
