"""Folders that cannot be written to are found before a run needs them. /proc takes no file, not even root's."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvcli.tools.doctor import machine
from nvcli.tools.doctor.findings import Level


def test_output(tmp_path: Path) -> None:
    assert machine.check_output(tmp_path).level == Level.OK
    assert "mkdir -p" in machine.check_output(tmp_path / "none").advice
    assert machine.check_output(Path("/proc")).level == Level.PROBLEM


def test_a_kernel_cache_need_not_exist_yet(tmp_path: Path) -> None:
    assert machine.check_kernel_cache(tmp_path / "a" / "b", "cuda").level == Level.OK
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("device", "level"), [("cuda", Level.PROBLEM), ("cpu", Level.NOTE)])
def test_an_unwritable_kernel_cache(tmp_path: Path, device: str, level: Level) -> None:
    (tmp_path / "file").write_text("")
    for folder in (Path("/proc/none/cache"), tmp_path / "file" / "cache"):
        assert machine.check_kernel_cache(folder, device).level == level  # type: ignore[arg-type]


def test_folders_that_cannot_be_looked_at(tmp_path: Path) -> None:
    """As below one that only another user may enter; a name that is too long fails for root too."""
    folder = tmp_path / ("a" * 300) / "b"
    assert machine.check_output(folder).level == Level.PROBLEM
    assert machine.check_kernel_cache(folder, "cuda").level == Level.OK  # what is there can be written to


def test_where_triton_keeps_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert machine.kernel_cache_folder() == tmp_path / ".triton" / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/there")
    assert machine.kernel_cache_folder() == Path("/there")


def test_a_full_disk_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_LITTLE_DISK", 1 << 60)
    assert machine.check_output(tmp_path).level == Level.WARNING
    assert machine.check_temporary().level == Level.WARNING
