"""The picture is a picture."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from test_measures import DECODE, MIXED

from nvcli.errors import ConfigError
from nvcli.tools.bench.plot import check_plot, draw_run

pytest.importorskip("matplotlib", reason="the `plot` extra is not installed")


@pytest.mark.parametrize(("suffix", "beginning"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_draws(suffix: str, beginning: bytes, tmp_path: Path) -> None:
    file = tmp_path / f"run{suffix}"
    draw_run(file, "a run", [MIXED, DECODE, DECODE], 10)
    assert file.read_bytes().startswith(beginning)


def test_a_picture_goes_into_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.svg")
    (tmp_path / "folder.png").mkdir()
    for name, found in (("fifo.svg", "it is a FIFO"), ("folder.png", "it is a folder")):
        with pytest.raises(ConfigError, match=rf"--plot .*{name}: {found}.*name another file"):
            check_plot(tmp_path / name)
    check_plot(tmp_path / "new.svg")
