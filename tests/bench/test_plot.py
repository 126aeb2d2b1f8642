"""The picture is a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_measures import DECODE, MIXED

from nvcli.bench.plot import draw_run

pytest.importorskip("matplotlib", reason="the `plot` extra is not installed")


@pytest.mark.parametrize(("suffix", "beginning"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_draws(suffix: str, beginning: bytes, tmp_path: Path) -> None:
    file = tmp_path / f"run{suffix}"
    draw_run(file, "a run", [MIXED, DECODE, DECODE], 10)
    assert file.read_bytes().startswith(beginning)
