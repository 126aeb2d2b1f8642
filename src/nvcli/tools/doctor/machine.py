"""Checks the machine around the GPUs: processors, memory, and system limits."""

from __future__ import annotations

import mmap
import os
import resource
from pathlib import Path
from typing import Literal

from nvcli.core.system.control_group import container_limit, container_room
from nvcli.core.system.host_memory import read_meminfo
from nvcli.core.system.process_limits import MIN_OPEN_FILES
from nvcli.tools.doctor.findings import Finding, format_gib, note, ok, problem, warning

_GOOD_OPEN_FILES = 1024
_GOOD_SHM_BYTES = 1 << 30


def check_machine(device: Literal["cpu", "cuda"], *, num_ranks: int) -> list[Finding]:
    """Check the machine for a run of `num_ranks` ranks on `device`."""
    return [
        check_processors(num_ranks),
        check_ram(),
        check_shm(Path("/dev/shm"), uses_nccl=device == "cuda" and num_ranks > 1),
        check_memfd(),
        check_open_files(),
        check_locked_memory(),
    ]


def check_processors(num_ranks: int) -> Finding:
    """Check the number of cores: the parent and the engine need one each besides the ranks."""
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} usable"
    if cores < num_ranks:
        return warning(
            "CPU cores", f"{found} for {num_ranks} ranks", "give the process more cores (taskset, container limits)"
        )
    return ok("CPU cores", found)


def check_ram(meminfo: Path = Path("/proc/meminfo")) -> Finding:
    """Check the free memory, and whether a container's limit is lower."""
    memory = read_meminfo(meminfo)
    total, available, limit, room = memory["MemTotal"], memory["MemAvailable"], container_limit(), container_room()
    found = f"{format_gib(available)} of {format_gib(total)} free"
    if limit is None or room is None or room >= available:
        return ok("RAM", found)
    return note("RAM", f"{found}; this container may use {format_gib(limit)}, of which {format_gib(room)} are free")


def check_shm(folder: Path, *, uses_nccl: bool) -> Finding:
    """Check /dev/shm. nvcli does not use it, but NCCL does."""
    name = str(folder)
    try:
        stat = os.statvfs(folder)
    except OSError as error:
        if not uses_nccl:
            return note(name, f"{error.strerror}; only NCCL (--tp above 1 on GPUs) uses it")
        return warning(name, f"{error.strerror}", "mount a tmpfs there; NCCL needs it between GPUs")
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    found = f"{format_gib(free)} of {format_gib(size)} free"
    if free >= _GOOD_SHM_BYTES:
        return ok(name, found)
    if not uses_nccl:
        return note(name, f"{found}; little, but only NCCL (--tp above 1 on GPUs) uses it")
    return warning(
        name,
        f"{found}; NCCL may fail with a bus error",
        "start the container with --shm-size=4g or --ipc=host, or: mount -o remount,size=4g /dev/shm",
    )


def check_memfd() -> Finding:
    """Check that processes can share anonymous memory, which the channel between engine and ranks needs."""
    try:
        fd = os.memfd_create("nvcli-doctor")
        try:
            os.ftruncate(fd, mmap.PAGESIZE)
            with mmap.mmap(fd, mmap.PAGESIZE) as memory:
                memory[0] = 1
        finally:
            os.close(fd)
    except (OSError, AttributeError) as error:
        return problem(
            "shared memory",
            f"memfd_create does not work: {error}",
            "nvcli needs Linux 3.17 or later and a sandbox that allows memfd_create",
        )
    return ok("shared memory", "memfd works")


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} (at most {_limit(hard)})"
    advice = "ulimit -n 65536; in a container --ulimit nofile=65536"
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        return problem("open files", found, advice)
    if soft != resource.RLIM_INFINITY and soft < _GOOD_OPEN_FILES:
        return warning("open files", found, advice)
    return ok("open files", found)


def check_locked_memory() -> Finding:
    """Report the limit on locked memory. CUDA's page-locked memory does not count towards it; network cards' does."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited")
    return note("locked memory", f"{format_gib(soft)}; enough for one machine (InfiniBand would want unlimited)")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
