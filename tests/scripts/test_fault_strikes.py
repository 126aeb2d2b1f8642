"""`scripts/faults.py strike`: memory that is really short, and what it takes for a run's end to be as it should."""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest

from demo_tasks import sample_lookups
from fault_job import Job
from fault_strikes import faults, make_long_rows, make_rows, run_out_of_memory, wrong_lines


def test_two_ranks_go_on_when_the_kernel_gives_one_no_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    job = Job(tmp_path / "job", None, ["-m", "demo", "--tp", "2", "--set", "device=cpu", "--progress", "none"])
    short, long = make_rows(random.Random(0))[:4], make_long_rows(random.Random(1), 24)
    wrong, _, code = run_out_of_memory(job, short, long, tp=2, device="cpu")
    assert wrong == []
    assert code == 0
    answers = job.answers()
    assert sorted(answers) == list(range(4 + 24))
    examples = [example for rng in [random.Random(1)] for _ in range(24) for example in sample_lookups(rng, 1, 60)]
    right = [json.loads(answers[4 + i])[0]["text"].strip() == example.answer for i, example in enumerate(examples)]
    assert sum(right) >= 22
    assert job.processes() == []


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
