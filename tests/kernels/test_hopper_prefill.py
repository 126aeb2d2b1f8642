"""The prefill kernel for Hopper is assembled as it is meant to be. What it computes is for tests on a GPU
(`tests/attention/test_gpu_backends.py`): Gluon has no interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.parametrize(("head_dim", "group", "soft_cap"), [(128, 4, 0.0), (64, 1, 30.0)])
def test_products_run_beside_other_work(head_dim: int, group: int, soft_cap: float) -> None:
    """ptxas says so where it waits for each matrix product, which halves the speed; registers that are spilled in the
    loop cost as much."""
    script = Path(__file__).with_name("hopper_compile.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, script, str(head_dim), str(group), str(soft_cap)]
    report = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert report.returncode == 0, report.stderr
    assert "Performance Loss" not in report.stdout
    (spilled,) = re.findall(r"(\d+) bytes spill stores", report.stdout)
    assert int(spilled) <= 300, "some are spilled around the loop, and none in it"
