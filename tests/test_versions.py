"""Versions are read without importing what they are of."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from nvcli import versions
from nvcli.versions import TorchBuild, describe_torch, torch_build


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
