"""`scripts/compile_kernels.py` finds the kernels of a model without a GPU; compiling them takes minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from combinations import full
from compiling_process import run_compiling

pytest.importorskip("triton", reason="Triton is not installed")

SCRIPTS = Path(__file__).parents[2] / "scripts"
RUN = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import compile_kernels
compile_kernels.MODELS["8B in FP8"][1]["hf_overrides"] = {{"num_hidden_layers": 3}}  # more launch the same kernels
compile_kernels.Compiler._compile = lambda self, compile_fn: compile_kernels.Variant(40, 8, 512, 1.5, PROBLEM)
sys.exit(compile_kernels.main())
"""


@pytest.mark.parametrize("problem", [full(None), "is not compiled"])
def test_kernels_are_found(tmp_path: Path, problem: str | None) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN.replace("PROBLEM", repr(problem)))
    done = run_compiling(script, "--gpu", "90", "--model", "8B in FP8")
    assert done.returncode == (problem is not None), done.stderr
    compiled, rest = done.stdout.split("not compiled:")
    for kernel in ("hopper_fp8_kernel", "fp8_decode_attention_kernel", "_sample_row_kernel", "_two_shot_kernel"):
        assert f".{kernel} " in compiled
    assert "w4_linear._dequantise_kernel" in rest
    assert ("hopper_fp8_kernel: is not compiled" in rest) == (problem is not None)
