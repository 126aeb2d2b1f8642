"""Installed versions, read from files: importing torch takes seconds, which `--version` must not take."""

from __future__ import annotations

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
    """Return the installed torch; None where there is none, or an unusual build that does not say what it is."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    version = re.search(r"^__version__\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    return TorchBuild(version[1], cuda[1] if cuda else None) if version else None


def package_version(distribution: str) -> str | None:
    """Return the version of a distribution; None where it is not installed."""
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
    """Return the versions that a measurement depends on; None for what is not installed (cuda: torch has none)."""
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
