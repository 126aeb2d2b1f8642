"""`scripts/benchmark.py`: cases take turns, and the table shows medians and shares."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from benchmark import Case, run_benchmark

SECONDS = {"slow": [9.0, 4.0, 2.0], "fast": [1.0, 1.0, 2.0]}


def test_cases_take_turns_and_medians_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[str] = []

    def measure(name: str, number: int) -> dict[str, float]:
        calls.append(f"{name} {number}")
        return {"seconds": SECONDS[name][number]}

    def cases(options: argparse.Namespace, stack: ExitStack) -> Iterator[Case]:
        stack.callback(calls.append, "closed")
        for name in (*SECONDS, "other"):
            yield Case(name, partial(measure, name), partial(calls.append, f"warm {name}"))

    file = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "slow", "fast", "--repeat", "3", "--json", str(file)])
    run_benchmark("A benchmark.", cases, compared="seconds", shows_median=True)
    assert calls == ["warm slow", "warm fast", *(f"{name} {n}" for n in range(3) for name in SECONDS), "closed"]
    header, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header == ["seconds", "share"]
    assert lines == [
        ["slow", "4", "1", "(2", "to", "9)"],
        ["fast", "1", "0.25", "(1", "to", "2)"],
        ["median", "2.5"],
    ]
    assert json.loads(file.read_text()) == {
        name: [{"seconds": each} for each in times] for name, times in SECONDS.items()
    }
