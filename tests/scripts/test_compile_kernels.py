"""`scripts/compile_kernels.py` finds the kernels of a model without a GPU; compiling them takes minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from combinations import full

pytest.importorskip("triton", reason="Triton is not installed")

SCRIPTS = Path(__file__).parents[2] / "scripts"
RUN = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import compile_kernels
compile_kernels.Compiler._compile = lambda self, compile_fn: compile_kernels.Variant(40, 8, 512, 1.5, PROBLEM)
sys.exit(compile_kernels.main())
"""


@pytest.mark.parametrize("problem", [full(None), "is not compiled"])
def test_kernels_are_found(problem: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", RUN.replace("PROBLEM", repr(problem)), "--gpu", "90", "--model", "8B in FP8"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == (problem is not None), done.stderr
    compiled, rest = done.stdout.split("not compiled:")
    for kernel in ("hopper_fp8_kernel", "fp8_decode_attention_kernel", "_sample_row_kernel", "_two_shot_kernel"):
        assert f".{kernel} " in compiled
    assert "w4_linear._dequantise_kernel" in rest
    assert ("hopper_fp8_kernel: is not compiled" in rest) == (problem is not None)
