"""`scripts/fuzz_python_rows.py`: hostile objects cost their row's answer alone, and it would notice if they did not."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest

from fuzz_python_rows import fuzz, rows_of
from nvcli.job.rows import parser

# The first imports transformers, before the LLM; what renders conversations is a copy.
pytestmark = pytest.mark.usefixtures("tokenizer", "warm_engines")


def test_hostile_rows_of_a_program() -> None:
    counts = fuzz(300, seed=2)
    assert counts["answered"] > 30
    assert counts["invalid_value"] > 50


def test_it_notices_when_objects_are_not_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def as_it_is(value: Any, key: str) -> Any:
        return value

    monkeypatch.setattr(parser, "plain_value", as_it_is)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # tracebacks of rows go there
    with pytest.raises(Exception, match=r"bug|good row"):
        fuzz(300, seed=2)


def test_every_tenth_row_is_good() -> None:
    rows = list(rows_of(50, random.Random(1)))
    assert [number for number, row in enumerate(rows) if isinstance(row, str) and row == "good"] == [0, 10, 20, 30, 40]
