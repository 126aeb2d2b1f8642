"""RAM of the machine and of this process in bytes, as Linux reports it; and a limit for this process."""

from __future__ import annotations

import resource
from pathlib import Path

from nvcli.core.system.control_group import container_room


def read_meminfo(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """Return each entry of /proc/meminfo (or of this process's status file), by name."""
    fields = (line.split() for line in path.read_text().splitlines())
    return {name.rstrip(":"): int(rest[0]) * 1024 for name, *rest in fields if rest and rest[0].isdigit()}


def total_ram() -> int:
    """Return the size of the machine's RAM."""
    return read_meminfo()["MemTotal"]


def available_ram() -> int:
    """Return the RAM that this process can take without swapping and within its container's limit."""
    available = read_meminfo()["MemAvailable"]
    room = container_room()
    return available if room is None else min(available, room)


def resident_bytes() -> int:
    """Return the RAM that this process holds."""
    return read_meminfo(Path("/proc/self/status")).get("VmRSS", 0)


def peak_resident_bytes() -> int:
    """Return the peak RAM of this process."""
    return read_meminfo(Path("/proc/self/status")).get("VmHWM", 0)


def limit_more_memory(num_bytes: int) -> None:
    """Let this process allocate at most `num_bytes` more. Beyond that it gets a MemoryError."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = read_meminfo(Path("/proc/self/status"))["VmData"] + num_bytes  # as RLIMIT_DATA counts it
    resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
