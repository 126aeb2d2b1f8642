"""Where Triton kernels are tested: compiled on the GPU if there is one, else interpreted on the CPU, in float32.

Without Triton the test module that imports this is skipped. `MARKS` is for its `pytestmark`: on a GPU machine these
tests are GPU tests like the others.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from benchmark import capture
from nvcli.kernels.triton.launch.triton_version import has_known_gluon

HAS_GPU = torch.cuda.is_available()
# conftest.py sets it, before Triton is imported.
assert HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1"

if not HAS_GPU:
    from triton.runtime import interpreter

    # Without `debug` the interpreter passes over `tl.device_assert`; random numbers overflow on purpose.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, debug=True, sanitize_overflow=False)

    from fast_interpreter import speed_up

    speed_up()

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
INTERPRETED_MARKS = [
    # The interpreter counts loops with arrays of one element, and numpy warns where a kernel meets a NaN.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
]
MARKS = [pytest.mark.gpu] if HAS_GPU else INTERPRETED_MARKS
Result = TypeVar("Result")
ON_HOPPER = HAS_GPU and has_known_gluon() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU and a version of Triton that was tried there")
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if HAS_GPU else [torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Absolute and relative, for numbers of about 1: two units in the last place of the half types."""


def captured(run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture a graph of what ran once before; return it and the result that its replays write."""
    results: list[Result] = []
    graph = capture(lambda: results.append(run()))
    return graph, results[-1]
