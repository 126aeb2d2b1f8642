"""A process that cannot open enough files, or whose folder is gone, is told so before it begins."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from fake_command import ENVIRON
from nvcli.core.system.process_limits import MIN_OPEN_FILES, check_process
from nvcli.errors import ConfigError


def test_every_command_names_what_it_lacks(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    nvcli = f"{sys.executable} -m nvcli"
    script = f"""
        {nvcli} generate --help > /dev/null || echo no help
        (ulimit -n 10; {nvcli} generate in.jsonl -m demo; echo "exit code $?")
        (ulimit -v 500000; {nvcli} generate in.jsonl -m demo; echo "exit code $?")
        mkdir {gone}; cd {gone}; rmdir {gone}
        {nvcli} profile-memory -m demo; echo "exit code $?"
    """
    command = ["bash", "-c", script]
    result = subprocess.run(command, cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split("\n") == ["exit code 2", "exit code 3", "exit code 2", ""]
    first, *of_rank, last = result.stderr.splitlines()
    assert "open 10 files (`ulimit -n`), but a run needs at least 256; raise it" in first
    (failure,) = (line for line in of_rank if "rank 0 failed at import" in line)
    assert "use 488.28 MiB of address space (`ulimit -v`, RLIMIT_AS), which may be the cause" in failure
    assert "the current folder cannot be used" in last


def test_limits_that_a_process_may_raise_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"soft": 20, "hard": 1000}

    def set_limit(which: int, values: tuple[int, int]) -> None:
        limits["soft"], limits["hard"] = values

    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits["soft"], limits["hard"]))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    check_process()
    assert limits == {"soft": 1000, "hard": 1000}
    limits.update(soft=20, hard=resource.RLIM_INFINITY)
    check_process()
    assert limits["soft"] >= 4096
    assert limits["hard"] == resource.RLIM_INFINITY
    limits.update(soft=10, hard=MIN_OPEN_FILES - 1)
    with pytest.raises(ConfigError, match="open 255 files"):
        check_process()


def test_a_folder_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_process()
    os.rmdir(tmp_path)
    with pytest.raises(ConfigError, match="removed or moved; `cd` to another one"):
        check_process()


def test_a_folder_too_deep_to_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(17):
        os.mkdir("d" * 250)
        os.chdir("d" * 250)
    with pytest.raises(ConfigError, match=r"folder has 4,\d{3} bytes, .* fewer than 4,096; `cd` to another"):
        check_process()
