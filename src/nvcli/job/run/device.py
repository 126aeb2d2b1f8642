"""The device of a run: which one `auto` stands for, and what keeps a GPU from being used. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from nvcli.core.config import RunConfig
from nvcli.core.system.versions import cuda_torch_advice, describe_torch, driver_cuda, torch_build

_DEV = Path("/dev")


def detect_device(environ: Mapping[str, str] = os.environ, dev: Path = _DEV) -> Literal["cpu", "cuda"]:
    """Return cuda if the driver shows a visible GPU and the installed torch was built for CUDA."""
    return "cuda" if _sees_gpu(environ, dev) and _torch_has_cuda() else "cpu"


def device_of(run: RunConfig) -> Literal["cpu", "cuda"]:
    """Return the device of a run; `auto`: look for a GPU."""
    return detect_device() if run.device == "auto" else run.device


def unused_gpu(run: RunConfig, environ: Mapping[str, str] = os.environ, dev: Path = _DEV) -> str | None:
    """Explain that torch cannot use a GPU that is there, and what to install; None if there is no GPU, or the run names
    its device."""
    if run.device != "auto" or not _sees_gpu(environ, dev) or _torch_has_cuda():
        return None
    return (
        f"there is an NVIDIA GPU, and the run is on the CPU, as torch {describe_torch(torch_build())} cannot use it; "
        f"{cuda_torch_advice(driver_cuda())}. `--set device=cpu` leaves this warning out"
    )


def _sees_gpu(environ: Mapping[str, str], dev: Path) -> bool:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    is_hidden = visible is not None and visible.strip() in ("", "-1")
    has_gpu = any(re.fullmatch(r"nvidia\d+", entry.name) for entry in dev.glob("nvidia*")) or (dev / "dxg").exists()
    return has_gpu and not is_hidden


def _torch_has_cuda() -> bool:
    build = torch_build()
    if build is None:  # an unusual build: let the ranks find out
        return find_spec("torch") is not None
    return build.cuda is not None
