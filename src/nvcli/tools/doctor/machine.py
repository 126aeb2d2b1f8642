"""Checks the machine around the GPUs: processors, memory, system limits, the folders that a run writes to, and whether
a model's weights fit, of which `nvcli profile-memory` gives the exact answer."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from nvcli.core.engine_config import EngineConfig
from nvcli.core.system.control_group import container_limit, container_room
from nvcli.core.system.host_memory import read_meminfo
from nvcli.core.system.kernel_cache import ADVICE, kernel_cache_folder
from nvcli.core.system.process_limits import MIN_OPEN_FILES
from nvcli.models.config import ModelConfig
from nvcli.sizing.ram import ram_of_weights, ways_to_less_ram
from nvcli.sizing.weights import rank_weights
from nvcli.tools.doctor.device_probe import GpuReport
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
    """Check the number of cores: each rank, the parent and the engine need one."""
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


_LITTLE_DISK = 1 << 30


def check_folders(device: Literal["cpu", "cuda"], output: Path) -> list[Finding]:
    """Check all folders. `output` is the folder of the output file."""
    return [check_output(output), check_kernel_cache(kernel_cache_folder(), device), check_temporary()]


def check_output(folder: Path) -> Finding:
    if not os.path.isdir(folder):  # Path's own method raises if a parent folder cannot be entered
        return problem("output", f"{folder} is not a folder", f"mkdir -p {folder}, or name another with --output")
    if (reason := folder_problem(folder)) is not None:
        return problem("output", f"{folder} cannot be written to: {reason}", "name another folder with --output")
    return _space("output", folder, "free some space, or name a folder on another disk with --output")


def check_kernel_cache(folder: Path, device: Literal["cpu", "cuda"]) -> Finding:
    existing = next(part for part in (folder, *folder.parents) if os.path.exists(part))
    reason = folder_problem(existing) if existing.is_dir() else f"{existing} is a file"
    if reason is None:
        return _space("kernel cache", folder, "set TRITON_CACHE_DIR to a folder on another disk", existing)
    found = f"{folder} cannot be written to: {reason}"
    if device == "cpu":
        return note("kernel cache", f"{found}; only runs on a GPU need it")
    return problem("kernel cache", found, ADVICE)


def check_temporary() -> Finding:
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        return problem("temporary files", str(error.strerror), "set TMPDIR to a folder that can be written to")
    return _space("temporary files", folder, "set TMPDIR to a folder on another disk")


def folder_problem(folder: Path) -> str | None:
    """Return the reason why no file can be created in a folder; None if one can.

    Creates one, because permissions do not reveal read-only or full disks.
    """
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _space(name: str, folder: Path, advice: str, existing: Path | None = None) -> Finding:
    free = shutil.disk_usage(existing or folder).free
    found = f"{folder}, {format_gib(free)} free"
    return ok(name, found) if free >= _LITTLE_DISK else warning(name, found, advice)


_LITTLE_ROOM = 2 << 30
"""Activations and CUDA graphs usually take about this much; the rest is for the KV cache."""


def check_fit(
    config: EngineConfig, model: ModelConfig, *, num_replicas: int, gpus: Sequence[GpuReport], ram: int
) -> Finding:
    """Check the weights of one rank against its memory.

    `num_replicas` is the data-parallel size, and `ram` is the free RAM in bytes, used on a CPU only.
    """
    size = config.tensor_parallel_size
    if config.device == "cpu":
        return _fit_ram(config, model, num_replicas=num_replicas, ram=ram)
    weights = sum(rank_weights(config, model).values())
    needed = gpus[: config.num_ranks * num_replicas]
    if not needed:
        return warning("memory", f"{format_gib(weights)} of weights per GPU, but no GPU to hold them", "see above")
    rooms = [
        int(gpu.total_bytes * config.gpu_memory_utilization) - (gpu.total_bytes - gpu.free_bytes) for gpu in needed
    ]
    left = min(rooms) - weights
    found = f"{format_gib(weights)} of weights ({config.weights_type}) on each GPU"
    if left > _LITTLE_ROOM:
        return ok("memory", f"{found}; leaves about {format_gib(left)} for KV cache and working memory")
    larger = _next_size(model, size)
    advice = "raise gpu_memory_utilization, free the GPUs" + (f", or use --tp {larger}" if larger else "")
    if left > 0:
        return warning("memory", f"{found}; leaves only about {format_gib(left)}", advice)
    return problem("memory", f"{found}; {format_gib(-left)} more than gpu_memory_utilization allows", advice)


def _fit_ram(config: EngineConfig, model: ModelConfig, *, num_replicas: int, ram: int) -> Finding:
    weights = ram_of_weights(config, model, num_replicas=num_replicas)
    found = f"{format_gib(weights)} of weights ({config.weights_type}) in {format_gib(ram)} of free RAM"
    if weights >= ram:
        return problem("memory", found, ways_to_less_ram(config, num_replicas=num_replicas))
    return ok("memory", found)


def _next_size(model: ModelConfig, size: int) -> int | None:
    """Return the next larger tensor-parallel size that divides the model; None if there is none."""
    return next((n for n in range(size + 1, 17) if model.divides_by(n)), None)
