"""`scripts/faults.py strike`: memory that is really short, and what it takes for a run's end to be as it should."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest

from demo_tasks import sample_lookups
from fault_job import Job, descendants
from fault_strikes import faults, make_long_rows, make_rows, run_out_of_memory, wrong_lines
from warm_process import WarmPopen


class Watched(WarmPopen):
    """A copy of the warm process, of which those that it starts are remembered: their environment does not tell."""

    started: ClassVar[set[int]] = set()

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 0.0)
        while self.poll() is None and time.monotonic() < deadline:
            self.started.update(descendants(self.pid))
            time.sleep(0.02)
        return super().wait(0.0 if timeout else None)


def test_two_ranks_go_on_when_the_kernel_gives_one_no_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    monkeypatch.setattr(subprocess, "Popen", Watched)
    job = Job(tmp_path / "job", None, ["-m", "demo", "--tp", "2", "--set", "device=cpu", "--progress", "none"])
    short, long = make_rows(random.Random(0))[:4], make_long_rows(random.Random(1), 12)
    wrong, _, code = run_out_of_memory(job, short, long, tp=2, device="cpu")
    assert wrong == []
    assert code == 0
    answers = job.answers()
    assert sorted(answers) == list(range(4 + 12))
    examples = [example for rng in [random.Random(1)] for _ in range(12) for example in sample_lookups(rng, 1, 60)]
    right = [json.loads(answers[4 + i])[0]["text"].strip() == example.answer for i, example in enumerate(examples)]
    assert sum(right) >= 11
    assert len(Watched.started) >= 5  # the engine, its ranks, and those that came in their place
    assert not any(Path(f"/proc/{pid}").exists() for pid in Watched.started)


def test_only_the_one_line_will_do() -> None:
    (fault,) = [fault for fault in faults(graphs=True) if (fault.name, fault.phase) == ("kill rank", "capture graphs")]
    pattern = fault.line.format(rank=1, pid=77, where=fault.phase, engine_at="start-up")
    line = "nvcli: error: rank 1 (pid 77) was killed by SIGKILL; it was at: capture graphs\n"
    assert wrong_lines(f"nvcli: demo is ready\n{line}nothing was answered yet\n", pattern) == []
    for said in ("", line * 2, line.replace("77", "78"), line.replace("capture graphs", "warm up")):
        assert "not one line" in wrong_lines(said, pattern)[0]
    assert wrong_lines(f"Traceback (most recent call last):\n{line}", pattern) == ["there is a traceback"]
    assert wrong_lines("", "") == []
    assert wrong_lines(line, "") != []
