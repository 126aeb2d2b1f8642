"""Versions are read without importing what they are of."""

from __future__ import annotations

import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from nvcli.core.system import versions
from nvcli.core.system.versions import TORCH, TorchBuild, cuda_torch_advice, describe_torch, torch_build


def test_of_the_torch_that_is_here() -> None:
    import torch

    assert torch_build() == TorchBuild(torch.__version__, torch.version.cuda)


@pytest.mark.parametrize(
    ("text", "described"),
    [
        ("__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\n", "2.11.0+cu130 (CUDA 13.0)"),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip = None\n", "2.13.0+cpu (without CUDA)"),
        ("cuda = None\n", "unknown"),
        (None, "unknown"),
    ],
)
def test_of_other_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, described: str) -> None:
    if text is not None:
        (tmp_path / "version.py").write_text(text)
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(versions, "find_spec", lambda name: spec)
    assert describe_torch(torch_build()) == described


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_spec", lambda name: None)
    assert describe_torch(torch_build()) == "not installed"


@pytest.mark.parametrize(
    ("driver", "named"),
    [
        ((13, 2), "https://download.pytorch.org/whl/cu130"),
        ((12, 9), "https://download.pytorch.org/whl/cu128"),
        ((12, 2), "https://download.pytorch.org/whl/cu126"),
        ((11, 8), "install a newer driver: this one supports CUDA up to 11.8"),
        (None, "install the NVIDIA driver"),
    ],
)
def test_the_torch_for_a_driver(driver: tuple[int, int] | None, named: str) -> None:
    assert named in cuda_torch_advice(driver)


def test_the_torch_that_is_advised_is_the_one_that_is_required() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert TORCH in project["project"]["dependencies"]
