"""Checks the installed Python, nvcli, torch and related packages without importing any."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Literal

from nvcli import __version__
from nvcli.core.system.versions import cuda_torch_advice, describe_torch, driver_cuda, package_version, torch_build
from nvcli.tools.doctor.findings import Finding, note, ok, problem, warning

_PYTHONS = ((3, 11), (3, 15))
"""The first supported version, and the first later one that is not supported."""

_OPTIONAL = ("flash-attn", "flash-attn-3", "flashinfer-python", "pyarrow", "matplotlib", "ray", "gguf")
"""Optional packages, by PyPI name."""


def check_software(device: Literal["cpu", "cuda"]) -> list[Finding]:
    """Check the software for a run on `device`."""
    return [
        check_python(),
        ok("nvcli", f"{__version__} in {Path(__file__).parents[2]}"),
        check_torch(device),
        check_triton(device),
        check_requirements(),
        *(check_compiler() if device == "cuda" else []),
        check_optional_packages(),
    ]


def check_python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    first, end = (".".join(map(str, version)) for version in _PYTHONS)
    if sys.platform != "linux":
        return problem("Python", found, "nvcli runs on Linux only")
    if not _PYTHONS[0] <= sys.version_info[:2] < _PYTHONS[1]:
        return problem("Python", found, f"install nvcli with a Python from {first} up to, not including, {end}")
    return ok("Python", found)


def check_torch(device: Literal["cpu", "cuda"]) -> Finding:
    build = torch_build()
    found = describe_torch(build)
    if found == "not installed":
        return problem("torch", found, "pip install nvcli, or pip install torch")
    if device == "cuda" and build is not None and build.cuda is None:
        return problem("torch", found, f"{cuda_torch_advice(driver_cuda())}; or use `device: cpu`")
    return ok("torch", found)


def check_triton(device: Literal["cpu", "cuda"]) -> Finding:
    version = package_version("triton")
    if version is None and device == "cuda":
        return warning(
            "triton",
            "not installed: runs have no fast kernels and no CUDA graphs",
            "pip install the triton that matches your torch; torch's CUDA builds bring it",
        )
    return ok("triton", version) if version else note("triton", "not installed; only GPUs need it")


def check_requirements() -> Finding:
    """Check that the packages that nvcli requires are installed in suitable versions."""
    from importlib import metadata

    from packaging.requirements import InvalidRequirement, Requirement

    try:
        texts = metadata.requires("nvcli") or []
    except metadata.PackageNotFoundError:
        return note("requirements", "nvcli runs from a folder and is not installed: not checked")
    wrong, number = [], 0
    for text in texts:
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        number += 1
        version = package_version(wanted.name)
        if version is None:
            wrong.append(f"{wanted.name} is not installed")
        elif not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{wanted.name} is {version}, wanted {wanted.specifier}")
    if wrong:
        return problem("requirements", "; ".join(wrong), "pip install --upgrade nvcli")
    return ok("requirements", f"all {number} packages are installed in suitable versions")


def check_compiler() -> list[Finding]:
    """Check the C compiler: Triton compiles a small C file for each kernel's launch."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    findings = []
    if compiler is None or shutil.which(compiler) is None:
        found = f"CC is {compiler}, which is not a program" if compiler else "neither gcc nor clang, and CC is not set"
        findings.append(
            problem("C compiler", f"{found}; Triton needs one", "apt-get install gcc, or set CC to a C compiler")
        )
    else:
        findings.append(ok("C compiler", compiler))
    if not header.exists():
        findings.append(
            problem("Python.h", f"{header} is missing; Triton needs it", "install Python's headers (python3-dev)")
        )
    return findings


def check_optional_packages() -> Finding:
    found = {name: package_version(name) for name in _OPTIONAL}
    there = [f"{name} {version}" for name, version in found.items() if version]
    absent = [name for name, version in found.items() if not version]
    return note("optional", "; ".join([*there, *([f"not installed: {', '.join(absent)}"] if absent else [])]))
