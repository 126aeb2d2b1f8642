"""Limits and kills as both versions of control groups write them, and what follows from them for the free RAM."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvcli.core.system import host_memory
from nvcli.core.system.control_group import OomKills, container_cores, container_limit, container_room, count_oom_kills

GIB = 1 << 30
NONE = "9223372036854771712\n"


def group(folder: Path, **files: str) -> None:
    """Write a group's files; `memory_max` stands for `memory.max`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("memory_", "memory.")).write_text(text)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own"
    path.write_text("0::/\n")
    return path


def test_no_limit(tmp_path: Path, own: Path) -> None:
    root = tmp_path / "cgroup"
    assert container_limit(root, own) is None  # no control groups at all
    group(root, memory_max="max\n", memory_current="5\n")
    group(root / "memory", **{"memory.limit_in_bytes": NONE, "memory.usage_in_bytes": "5\n"})
    assert container_limit(root, own) is None
    assert container_room(root, own) is None


def test_cores(tmp_path: Path, own: Path) -> None:
    root = tmp_path / "cgroup"
    group(root, memory_max="max\n")
    assert container_cores(root, own) is None
    (root / "cpu.max").write_text("max 100000\n")
    assert container_cores(root, own) is None
    (root / "cpu.max").write_text("250000 100000\n")
    assert container_cores(root, own) == 2.5


def test_a_container_of_version_2(tmp_path: Path, own: Path) -> None:
    root = tmp_path / "cgroup"
    stat = f"anon {2 * GIB}\nfile {3 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\nshmem {GIB}\n"
    group(root, memory_max=f"{8 * GIB}\n", memory_current=f"{5 * GIB}\n", memory_stat=stat)
    assert container_limit(root, own) == 8 * GIB
    assert container_room(root, own) == (8 - 5 + 2) * GIB, "read files are given up, shared memory is not"


def test_the_tightest_group_around_the_process_counts(tmp_path: Path, own: Path) -> None:
    root = tmp_path / "cgroup"
    own.write_text("0::/user.slice/job.scope\n")
    group(root / "user.slice", memory_max=f"{4 * GIB}\n", memory_current=f"{3 * GIB}\n")
    group(root / "user.slice/job.scope", memory_max=f"{3 * GIB}\n", memory_current="0\n")
    assert container_limit(root, own) == 3 * GIB
    assert container_room(root, own) == GIB


def test_a_container_of_version_1_whose_path_is_the_hosts(tmp_path: Path, own: Path) -> None:
    own.write_text("5:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/docker/abc\n")
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 1000\ntotal_active_file 24\n"
    files = {"memory.limit_in_bytes": f"{GIB}\n", "memory.usage_in_bytes": f"{GIB}\n", "memory.stat": stat}
    group(tmp_path / "cgroup/memory", **files)
    assert container_limit(tmp_path / "cgroup", own) == GIB
    assert container_room(tmp_path / "cgroup", own) == 1024


def test_kills_are_counted_where_they_are_told_of(tmp_path: Path, own: Path) -> None:
    root, vmstat = tmp_path / "cgroup", tmp_path / "vmstat"
    assert count_oom_kills(root, own, vmstat) is None
    vmstat.write_text("pgfault 7\noom_kill 3\n")
    assert count_oom_kills(root, own, vmstat) == OomKills(count=3, where="this machine")
    group(root / "memory", **{"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"})
    assert count_oom_kills(root, own, vmstat) == OomKills(count=2, where="this container or service")
    (root / "memory/memory.oom_control").unlink()
    group(root, memory_events="low 0\noom 4\noom_kill 1\noom_group_kill 0\n")
    assert count_oom_kills(root, own, vmstat) == OomKills(count=1, where="this container or service")


@pytest.mark.parametrize(("room", "available"), [(None, 8 * GIB), (3 * GIB, 3 * GIB), (9 * GIB, 8 * GIB)])
def test_free_ram_is_what_the_container_may_take(
    monkeypatch: pytest.MonkeyPatch, room: int | None, available: int
) -> None:
    monkeypatch.setattr(host_memory, "read_meminfo", lambda: {"MemAvailable": 8 * GIB})
    monkeypatch.setattr(host_memory, "container_room", lambda: room)
    assert host_memory.available_ram() == available
