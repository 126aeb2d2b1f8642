"""Asks `nvidia-smi` what torch does not report: the driver, other programs' memory, MIG, the links between GPUs.

Its output is parsed leniently: values that are missing or in another format are skipped.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_SECONDS = 30.0
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_GPU_FIELDS = "index,uuid,name,driver_version,memory.total,memory.used,mig.mode.current,compute_cap"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiGpu:
    """A GPU as the driver numbers it, hidden ones included."""

    index: int
    uuid: str
    """The uuid without the `GPU-` in front."""
    name: str
    driver: str = ""
    total_bytes: int
    """Memory of the GPU; 0: not reported, as for one that shares the machine's memory or is cut into slices."""
    used_bytes: int = 0
    mig: bool = False
    capability: tuple[int, int] | None = None
    """Compute capability; None: not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiProcess:
    """A program that holds memory of a GPU."""

    gpu_uuid: str
    pid: int
    name: str
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SmiReport:
    """The answer of nvidia-smi; empty if there is none."""

    gpus: Mapping[str, SmiGpu] = field(default_factory=dict)
    """The GPUs by uuid."""
    processes: tuple[SmiProcess, ...] = ()
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Pair of GPU indices, the smaller first → link (NV18, PIX, PHB, SYS, …)."""
    failure: str = ""
    """Why an installed nvidia-smi gave no answer; empty if it did."""


def ask_nvidia_smi() -> SmiReport:
    """Query everything. Takes a second or two if the driver has to wake the GPUs first."""
    report = ask_for_gpus()
    gpus = report.gpus
    if not gpus:
        return report
    processes: tuple[SmiProcess, ...] = ()
    links: dict[tuple[int, int], str] = {}
    with contextlib.suppress(_Failed):
        processes = parse_processes(
            _run("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits")
        )
    if len(gpus) > 1:
        with contextlib.suppress(_Failed):
            links = parse_links(_run("topo", "-m"))
    return SmiReport(gpus=gpus, processes=processes, links=links)


def ask_for_gpus() -> SmiReport:
    """Query only the GPUs: one call, about 0.1 s if they are awake."""
    if shutil.which("nvidia-smi") is None:
        return SmiReport()
    try:
        gpus = parse_gpus(_run(f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"))
    except _Failed as failed:
        return SmiReport(failure=str(failed))
    return SmiReport(gpus=gpus)


def visible_gpus(report: SmiReport | None = None, environ: Mapping[str, str] = os.environ) -> list[SmiGpu] | str:
    """Return the GPUs that a CUDA process sees, in its order; or the reason why they cannot be told.

    `report` None: nvidia-smi is asked. CUDA_VISIBLE_DEVICES is read as CUDA reads it: indices or prefixes of uuids, up
    to the first invalid one.
    """
    report = ask_for_gpus() if report is None else report
    in_order = sorted(report.gpus.values(), key=lambda gpu: gpu.index)
    if not in_order:
        return report.failure or "nvidia-smi lists no GPU"
    numbering = environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    if len({gpu.name for gpu in in_order}) > 1 and numbering != "PCI_BUS_ID":
        return "the GPUs are of different kinds, and CUDA orders them by speed unless CUDA_DEVICE_ORDER is PCI_BUS_ID"
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    seen = in_order if listed is None else []
    for name in (listed or "").split(","):
        name = name.strip()
        if name.startswith("MIG"):
            return "CUDA_VISIBLE_DEVICES names slices of GPUs (MIG)"
        if name.isdecimal():
            found = [gpu for gpu in in_order if gpu.index == int(name)]
        else:
            found = [gpu for gpu in in_order if name.startswith("GPU-") and gpu.uuid.startswith(name[4:])]
        if len(found) != 1 or found[0] in seen:
            break
        seen.append(found[0])
    if any(gpu.mig for gpu in seen):
        return "a GPU is cut into slices (MIG)"
    if any(not gpu.total_bytes for gpu in seen):
        return "nvidia-smi does not report how much memory a GPU has"
    return seen or f"CUDA_VISIBLE_DEVICES={listed} lists no GPU"


def smallest_memory(gpus: Sequence[SmiGpu] | None = None) -> int | None:
    """Return the memory of the smallest of `gpus` (None: those that a CUDA process sees), in bytes; None: not known."""
    found = visible_gpus() if gpus is None else gpus
    if isinstance(found, str):
        return None
    return min((gpu.total_bytes for gpu in found if gpu.total_bytes), default=None)


class _Failed(Exception):
    pass


def _run(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise _Failed(f"nvidia-smi gave no answer within {_SECONDS:g} s") from None
    except OSError as error:
        raise _Failed(f"nvidia-smi cannot be started: {error.strerror}") from None
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise _Failed(f"nvidia-smi failed: {lines[0].strip() if lines else f'exit code {done.returncode}'}")
    return done.stdout


def parse_gpus(text: str) -> dict[str, SmiGpu]:
    """Parse the CSV of `--query-gpu`. Unreported memory becomes 0; the compute capability may be missing."""
    gpus = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            index, uuid, name, driver, total, used, mig, *rest = (field.strip() for field in line.split(","))
            gpu = SmiGpu(
                index=int(index),
                uuid=uuid.removeprefix("GPU-"),
                name=name,
                driver=driver,
                total_bytes=_mib(total),
                used_bytes=_mib(used),
                mig=mig == "Enabled",
                capability=_capability(rest[0] if rest else ""),
            )
            gpus[gpu.uuid] = gpu
    return gpus


def _capability(text: str) -> tuple[int, int] | None:
    """Parse a compute capability such as 9.0; None for other texts, such as [N/A]."""
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def _mib(text: str) -> int:
    """Parse mebibytes to bytes; 0 for a text that is not a number, such as [N/A] or [Unknown Error]."""
    return int(text) << 20 if text.isdecimal() else 0


def parse_processes(text: str) -> tuple[SmiProcess, ...]:
    """Parse the CSV of `--query-compute-apps`. Unreported memory becomes 0."""
    processes = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            uuid, pid, rest = line.split(",", 2)
            name, _, used = rest.rpartition(",")
            processes.append(
                SmiProcess(
                    gpu_uuid=uuid.strip().removeprefix("GPU-"),
                    pid=int(pid),
                    name=name.strip(),
                    used_bytes=_mib(used.strip()),
                )
            )
    return tuple(processes)


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """Parse `topo -m`: a table with a row and a column for each GPU, and others for network cards."""
    rows = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    header = next((row for row in rows if row and row[0] == "GPU0"), [])
    columns = [int(name[3:]) for name in header if re.fullmatch(r"GPU\d+", name)]
    links = {}
    for row in rows:
        if row and row is not header and re.fullmatch(r"GPU\d+", row[0]):
            index = int(row[0][3:])
            for other, link in zip(columns, row[1:], strict=False):
                if index < other:
                    links[index, other] = link
    return links
