"""Jobs whose processes are killed again and again come out as if they had never been touched."""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fake_command import ENVIRON, nvcli_command
from fault_kills import VICTIMS, KilledJob, change_rows, comparable, unpacked, write_rows
from warm_process import WarmPopen, run_warm
from weightless_model import write_weightless_model

SETTINGS = ["--set", "device=cpu", "--set", "job.sync_seconds=0.1", "--progress", "none"]


def finish_untouched(command: Sequence[str], **popen: Any) -> None:
    done = run_warm(command, capture_output=True, **popen)
    assert done.returncode == 1, done.stderr  # some rows are bad


def finish_killed(job: KilledJob, kills: int, victims: Sequence[str]) -> Counter[str]:
    assert job.run(kills=kills, victims=victims) == 1
    return job.kills


@pytest.mark.timeout(600)
def test_the_real_command_survives_kills_of_all_its_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "nvcli", "generate", "-m", "demo", *SETTINGS]
    source = str(write_rows(tmp_path / "in.jsonl", random.Random(1), 56, tokens=40))
    jobs = {}
    for seed, order, suffix in ((5, "completion", ""), (6, "input", ".gz")):
        output = tmp_path / f"{order}.jsonl{suffix}"
        # Few rows at a time, so that they finish one after the other.
        arguments = [*command, source, "-o", str(output), "--order", order, "--set", "max_num_seqs=16"]
        rng = random.Random(seed)
        jobs[order] = output, KilledJob(arguments, output, rng=rng, run_seconds=0.1, start=WarmPopen, env=ENVIRON)
    whole = tmp_path / "whole.jsonl"
    with ThreadPoolExecutor(2) as pool:  # one for each core
        orders = (VICTIMS[:2], VICTIMS[2:])
        killed = [
            pool.submit(finish_killed, job, 2, victims) for (_, job), victims in zip(jobs.values(), orders, strict=True)
        ]
        untouched = pool.submit(finish_untouched, [*command, source, "-o", str(whole), "--order", "input"], env=ENVIRON)
        kills = sum((future.result() for future in killed), Counter[str]())
        untouched.result()
    assert set(kills) == {"parent", "engine", "rank 0", "Ctrl-C"}
    for order, (output, _) in jobs.items():
        ordered = order == "input"
        assert comparable(unpacked(output), ordered=ordered) == comparable(whole.read_bytes(), ordered=ordered)
    assert_nothing_else(tmp_path, 3)


@pytest.mark.parametrize(("order", "suffix"), [("completion", ".zst"), ("input", "")])
def test_the_parent_survives_kills(tmp_path: Path, order: str, suffix: str) -> None:
    """The same with engines that are fakes: many kills in little time."""
    (tmp_path / "model").mkdir()
    write_weightless_model(tmp_path / "model")
    source = write_rows(tmp_path / "in.jsonl", random.Random(2), 900, tokens=12)
    whole, output = tmp_path / "whole.jsonl", tmp_path / f"out.jsonl{suffix}"
    (tmp_path / "script").mkdir()

    def command(output: Path, seconds: float) -> list[str]:
        settings = ["-m", str(tmp_path / "model"), "--order", order, "--set", "max_num_seqs=8", *SETTINGS]
        return nvcli_command(
            *("generate", str(source), "-o", str(output), *settings),
            cwd=tmp_path / "script",
            fakes=f"on_poll=lambda: __import__('time').sleep({seconds}), seed=os.getpid()",
        )

    finish_untouched(command(whole, 0.0), env=ENVIRON)
    job = KilledJob(
        command(output, 0.02), output, rng=random.Random(len(order) + len(suffix)), start_seconds=1, run_seconds=0.2,
        start=WarmPopen, env=ENVIRON,
    )  # fmt: skip
    assert job.run(kills=6, victims=("parent", "parent", "Ctrl-C")) == 1
    assert job.kills.total() >= 4
    ordered = order == "input"
    assert comparable(unpacked(output), ordered=ordered) == comparable(whole.read_bytes(), ordered=ordered)
    if suffix != ".zst":
        return  # once is enough for updates
    change_rows(source, random.Random(3), share=0.5, tokens=12)
    finish_untouched([*command(whole, 0.0), "--overwrite"], env=ENVIRON)
    updated = KilledJob(
        [*command(output, 0.02), "--update"], output, rng=random.Random(4), start_seconds=1, run_seconds=0.2,
        start=WarmPopen, env=ENVIRON,
    )  # fmt: skip
    assert updated.run(kills=3, victims=("parent", "Ctrl-C")) == 1
    assert updated.kills.total() >= 1
    assert comparable(unpacked(output), ordered=False) == comparable(whole.read_bytes(), ordered=False)


def assert_nothing_else(folder: Path, num_outputs: int) -> None:
    """Outputs with their manifests and digests, the input, and no temporary file."""
    assert len(os.listdir(folder)) == 3 * num_outputs + 1
