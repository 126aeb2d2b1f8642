"""Installed versions, read from files: `--version` must not wait seconds for torch's import."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from nvcli.version import __version__


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed torch, as its version.py describes it."""

    version: str
    cuda: str | None
    """The CUDA version that torch was built for; None: it was built without CUDA."""


def torch_build() -> TorchBuild | None:
    """Return the installed torch; None if there is none, or an unusual build that does not describe itself."""
    text = _read_file_of("torch", "version.py")
    version = re.search(r"^__version__\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return TorchBuild(version[1], cuda[1] if cuda else None) if version else None


def _read_file_of(package: str, name: str) -> str:
    """Return the text of a file of an installed package; empty if it is missing."""
    spec = find_spec(package)
    if spec is not None and spec.origin is not None:
        with contextlib.suppress(OSError):
            return Path(spec.origin).with_name(name).read_text(encoding="utf-8")
    return ""


TORCH = "torch>=2.11,<2.16"
"""Supported versions of torch, as in pyproject.toml."""
_CUDA_INDEXES = (((13, 0), "cu130"), ((12, 8), "cu128"), ((12, 0), "cu126"))
"""(lowest CUDA version of the driver, package index of torch). CUDA 12.6 runs on all drivers of CUDA 12."""


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports, without waking a GPU; None: no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def cuda_torch_advice(driver: tuple[int, int] | None) -> str:
    """Return which torch to install for a driver that supports CUDA up to this version."""
    if driver is None:
        return "install the NVIDIA driver, and a torch built for a CUDA version that it supports (pytorch.org)"
    index = next((name for least, name in _CUDA_INDEXES if driver >= least), None)
    serves = ".".join(map(str, driver))
    if index is None:
        return f"install a newer driver: this one supports CUDA up to {serves}, and torch needs 12.0 or later"
    return (
        f"install one for this driver (CUDA up to {serves}): pip install --force-reinstall '{TORCH}' --index-url "
        f"https://download.pytorch.org/whl/{index}"
    )


def triton_version() -> str | None:
    """Return the version of the Triton that would be imported, from its `__init__.py`; None: unknown or not
    installed."""
    text = _read_file_of("triton", "__init__.py")
    found = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return found[1] if found else None


def package_version(distribution: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def describe_torch(build: TorchBuild | None) -> str:
    """Return the version of torch as text, such as `2.11.0+cu130 (CUDA 13.0)`."""
    if build is None:
        return "unknown" if find_spec("torch") else "not installed"
    return f"{build.version} ({f'CUDA {build.cuda}' if build.cuda else 'without CUDA'})"


def installed_versions() -> dict[str, str | None]:
    """Return the versions that a measurement depends on; None if not installed (cuda: if torch has none)."""
    build = torch_build()
    return {
        "nvcli": __version__,
        "python": platform.python_version(),
        "torch": build.version if build is not None else package_version("torch"),
        "cuda": build.cuda if build is not None else None,
        "triton": package_version("triton"),
    }


def describe_versions() -> str:
    """Return the text that `nvcli --version` prints."""
    return (
        f"nvcli {__version__}\n"
        f"Python {platform.python_version()}\n"
        f"torch {describe_torch(torch_build())}\n"
        f"triton {package_version('triton') or 'not installed'}"
    )
