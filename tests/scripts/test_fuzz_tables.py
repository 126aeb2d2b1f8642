"""`scripts/fuzz_tables.py`: mutated tables give rows or an error, and it would notice if a process died of one."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

import fuzz_tables
from fuzz_tables import fork_cases, make_file, mutate


@pytest.mark.parametrize("kind", ["file", "stream", "parquet"])
def test_mutated_tables(tmp_path: Path, kind: str) -> None:
    rng = random.Random(2)
    cases = []
    for number in range(60):
        path = tmp_path / f"{number}.{'parquet' if kind == 'parquet' else 'arrow'}"
        sound = make_file(rng, kind)
        path.write_bytes(sound if number % 20 == 0 else mutate(sound, rng))
        cases.append((number, path))
    outcomes = dict(fork_cases(cases))
    assert [outcomes[number] for number in (0, 20, 40)] == ["rows"] * 3
    assert set(outcomes.values()) == {"rows", "error"}


def test_a_death_and_an_exception_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> str:
        if path.name == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if path.name == "2":
            raise SystemError
        return "rows"

    monkeypatch.setattr(fuzz_tables, "read", read)
    monkeypatch.setattr(fuzz_tables.traceback, "print_exc", lambda: None)
    cases = [(number, tmp_path / str(number)) for number in range(4)]
    assert dict(fork_cases(cases)) == {0: "rows", 1: "died (-9)", 2: "exception", 3: "rows"}
