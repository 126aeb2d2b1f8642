"""Checks the machine around the GPUs: processors, memory, and the limits that the system sets."""

from __future__ import annotations

import mmap
import os
import resource
from pathlib import Path
from typing import Literal

from nvcli.doctor.findings import Finding, format_gib, note, ok, problem, warning
from nvcli.host_memory import read_meminfo

_MIN_OPEN_FILES = 256
_GOOD_OPEN_FILES = 1024
_GOOD_SHM_BYTES = 1 << 30
_CACHE_SHARE = 0.25
"""The share of the free RAM that a CPU run's KV cache takes by default (`runner.memory`)."""


def check_machine(device: Literal["cpu", "cuda"], *, num_ranks: int) -> list[Finding]:
    """Check the machine for a run of `num_ranks` ranks on `device`."""
    return [
        check_processors(num_ranks),
        check_ram(device),
        check_shm(Path("/dev/shm"), uses_nccl=device == "cuda" and num_ranks > 1),
        check_memfd(),
        check_open_files(),
        check_locked_memory(),
    ]


def check_processors(num_ranks: int) -> Finding:
    """Check the number of cores: the parent and the engine want one each beside the ranks."""
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} usable"
    if cores < num_ranks:
        return warning(
            "CPU cores", f"{found} for {num_ranks} ranks", "give the process more cores (taskset, container limits)"
        )
    return ok("CPU cores", found)


def check_ram(device: Literal["cpu", "cuda"], meminfo: Path = Path("/proc/meminfo")) -> Finding:
    """Check the free memory, and whether a container's limit is below it."""
    memory = read_meminfo(meminfo)
    total, available, limit = memory["MemTotal"], memory["MemAvailable"], container_limit()
    found = f"{format_gib(available)} of {format_gib(total)} free"
    if limit is None or limit >= available:
        return ok("RAM", found)
    found += f"; this container may use {format_gib(limit)}"
    if device == "cpu" and limit < 2 * _CACHE_SHARE * available:
        return warning(
            "RAM",
            f"{found}, and a CPU run sizes its KV cache by what the machine has free",
            f"--set kv_cache_memory={max(1, int(limit * _CACHE_SHARE / 2**20))}MiB",
        )
    return note("RAM", found)


def container_limit(cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes of RAM that the container may use, by either version of cgroups; None without a limit."""
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (cgroup / file).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def check_shm(folder: Path, *, uses_nccl: bool) -> Finding:
    """Check /dev/shm. nvcli's own messages need none of it, but NCCL's do."""
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
    """Check that processes can share anonymous memory: the channel between engine and ranks is made of it."""
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
    if soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES:
        return problem("open files", found, advice)
    if soft != resource.RLIM_INFINITY and soft < _GOOD_OPEN_FILES:
        return warning("open files", found, advice)
    return ok("open files", found)


def check_locked_memory() -> Finding:
    """Report the limit of locked memory. CUDA's page-locked memory does not count against it; network cards' does."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "unlimited")
    return note("locked memory", f"{format_gib(soft)}; enough for one machine (InfiniBand would want unlimited)")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
