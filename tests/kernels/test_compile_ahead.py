"""Kernels that are compiled ahead are launched when that is over, and not before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compiling_process import run_compiling

pytest.importorskip("triton", reason="Triton is not installed")


def test_kernels_are_compiled_in_processes_and_launched_later(tmp_path: Path) -> None:
    """One that no other process can import is compiled by a thread; one that fails on a thread, by the program's own;
    one that cannot be compiled says so."""
    done = run_compiling(Path(__file__).with_name("ahead_compile.py"), TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["hashes"] == 1
    assert found["launched_ahead"] == 0
    in_cache = True
    assert found["compiled_ahead"] == [
        ["compile", "fill", not in_cache],
        ["compile", "fill", not in_cache],
        ["compile", "hopper_fp8_kernel", in_cache],
    ]
    assert found["devices"] == [["compile", "cuda:1"]]
    # Twice three launches and one that keeps what was compiled itself.
    assert (found["launched"], found["compiled_later"]) == (8, 0)
    assert found["error"] == "CompileTimeAssertionFailure"
    assert (found["launched_after_failure"], found["after_failure"]) == (9, [["MainThread", "fill", False]])
    assert found["compiled_again"] == [["compile", "hopper_fp8_kernel", in_cache]]
