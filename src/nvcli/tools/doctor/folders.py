"""Checks the folders that a run writes to: for answers, compiled kernels and temporary files."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal

from nvcli.core.system.kernel_cache import ADVICE, kernel_cache_folder
from nvcli.tools.doctor.findings import Finding, format_gib, note, ok, problem, warning

_LITTLE_BYTES = 1 << 30


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
    return ok(name, found) if free >= _LITTLE_BYTES else warning(name, found, advice)
