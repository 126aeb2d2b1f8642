"""Versions that cannot work are named."""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from nvcli.core.system.versions import TorchBuild
from nvcli.tools.doctor import software
from nvcli.tools.doctor.findings import Level


def test_this_installation_is_fit() -> None:
    assert [finding for finding in software.check_software("cpu") if finding.level == Level.PROBLEM] == []


@pytest.mark.parametrize(
    ("version", "level"), [((3, 10), Level.PROBLEM), ((3, 12), Level.OK), ((3, 14), Level.OK), ((3, 15), Level.PROBLEM)]
)
def test_python(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], level: Level) -> None:
    monkeypatch.setattr(sys, "version_info", (*version, 0))
    assert software.check_python().level == level


@pytest.mark.parametrize(
    ("build", "device", "level"),
    [
        (TorchBuild("2.11.0+cu130", "13.0"), "cuda", Level.OK),
        (TorchBuild("2.11.0+cpu", None), "cuda", Level.PROBLEM),
        (TorchBuild("2.11.0+cpu", None), "cpu", Level.OK),
    ],
)
def test_torch(monkeypatch: pytest.MonkeyPatch, build: TorchBuild, device: str, level: Level) -> None:
    monkeypatch.setattr(software, "torch_build", lambda: build)
    assert software.check_torch(device).level == level  # type: ignore[arg-type]


def test_requirements_that_are_not_met(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["rich>=999", "no-such-package>=1", "typer", "other; extra == 'dev'"]
    monkeypatch.setattr(metadata, "requires", lambda name: wanted)
    finding = software.check_requirements()
    assert finding.level == Level.PROBLEM
    assert "rich is" in finding.found
    assert "no-such-package is not installed" in finding.found
    assert "typer" not in finding.found
    assert "other" not in finding.found


def test_no_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "neither gcc nor clang" in software.check_compiler()[0].found
    monkeypatch.setenv("CC", "/no/such/cc")
    assert "CC is /no/such/cc" in software.check_compiler()[0].found


def test_the_pythons_are_those_of_the_package_and_of_the_script_that_installs_it() -> None:
    root = Path(__file__).parent.parent.parent.parent
    first, end = software._PYTHONS
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["requires-python"]
    assert wanted == f">={first[0]}.{first[1]},<{end[0]}.{end[1]}"
    assert f"{first} <= sys.version_info[:2] <= {(end[0], end[1] - 1)}" in (root / "scripts/setup-venv").read_text()
