"""Limits of the system, by what a run needs of them."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from nvcli.tools.doctor import machine
from nvcli.tools.doctor.findings import Level


def write_meminfo(path: Path, *, available_gib: int) -> Path:
    kib = available_gib << 20
    path.write_text(f"MemTotal:       {2 * kib} kB\nMemAvailable:   {kib} kB\nHugePages_Total:       0\n")
    return path


def test_this_machine_is_fit() -> None:
    findings = machine.check_machine("cpu", num_ranks=1)
    assert all(finding.level != Level.PROBLEM for finding in findings), findings


@pytest.mark.parametrize(
    ("limit_gib", "room_gib", "level"), [(None, None, Level.OK), (64, 40, Level.OK), (20, 3, Level.NOTE)]
)
def test_a_containers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_gib: int | None, room_gib: int | None, level: Level
) -> None:
    monkeypatch.setattr(machine, "container_limit", lambda: limit_gib and limit_gib << 30)
    monkeypatch.setattr(machine, "container_room", lambda: room_gib and room_gib << 30)
    finding = machine.check_ram(write_meminfo(tmp_path / "meminfo", available_gib=32))
    assert finding.level == level
    if level == Level.NOTE:
        assert "this container may use 20.0 GiB, of which 3.0 GiB are free" in finding.found


@pytest.mark.parametrize(
    ("limit", "level"), [(64, Level.PROBLEM), (512, Level.WARNING), (1024, Level.OK), (-1, Level.OK)]
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, limit: int, level: Level) -> None:
    assert resource.RLIM_INFINITY == -1
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, -1))
    assert machine.check_open_files().level == level


def test_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.check_shm(tmp_path / "none", uses_nccl=True).level == Level.WARNING
    assert machine.check_shm(tmp_path / "none", uses_nccl=False).level == Level.NOTE

    def refuse(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(machine.os, "memfd_create", refuse)
    assert machine.check_memfd().level == Level.PROBLEM


def test_little_shared_memory_matters_to_nccl_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_GOOD_SHM_BYTES", 1 << 60)
    assert machine.check_shm(Path("/dev/shm"), uses_nccl=False).level == Level.NOTE
    finding = machine.check_shm(Path("/dev/shm"), uses_nccl=True)
    assert finding.level == Level.WARNING
    assert "--shm-size" in finding.advice


def test_fewer_cores_than_ranks() -> None:
    assert machine.check_processors(1).level == Level.OK
    assert machine.check_processors(100_000).level == Level.WARNING
