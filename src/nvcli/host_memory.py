"""RAM as Linux tells of it: of the machine and of this process, in bytes."""

from __future__ import annotations

from pathlib import Path

from nvcli.control_group import container_room


def read_meminfo(path: Path = Path("/proc/meminfo")) -> dict[str, int]:
    """Return each entry of /proc/meminfo (or of this process's status file), by name."""
    fields = (line.split() for line in path.read_text().splitlines())
    return {name.rstrip(":"): int(rest[0]) * 1024 for name, *rest in fields if rest and rest[0].isdigit()}


def total_ram() -> int:
    """Return the size of the machine's RAM."""
    return read_meminfo()["MemTotal"]


def available_ram() -> int:
    """Return the RAM that this process can take: without swapping, and within the limit of its container."""
    available = read_meminfo()["MemAvailable"]
    room = container_room()
    return available if room is None else min(available, room)


def resident_bytes() -> int:
    """Return the RAM that this process holds."""
    return read_meminfo(Path("/proc/self/status")).get("VmRSS", 0)


def data_bytes() -> int:
    """Return the memory that this process has asked for, as the limit RLIMIT_DATA counts it."""
    return read_meminfo(Path("/proc/self/status"))["VmData"]


def peak_resident_bytes() -> int:
    """Return the most RAM that this process has held."""
    return read_meminfo(Path("/proc/self/status")).get("VmHWM", 0)
