"""The `triton` backend with its kernels for Hopper GPUs, which are simulated on the CPU (`gluon_simulator.py`)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import triton.language as tl
from torch import Tensor

from gluon_simulator import SimulatedKernel, Simulator
from nvcli.attention.backend import AttentionCase
from nvcli.attention.triton_backend import TritonBackend
from nvcli.kernels.triton.attention import hopper_prefill_kernel, hopper_segment_kernel, prefill_choice
from nvcli.kernels.triton.attention.attention_launch import AttentionShape
from nvcli.kernels.triton.attention.prefill_attention import PrefillAttention, PrefillKind


def _hopper_kernel(shape: AttentionShape, *, has_window: bool, **options: object) -> tuple[PrefillAttention, list[str]]:
    return PrefillAttention(shape, PrefillKind.USUAL if has_window else PrefillKind.HOPPER), []


class SimulatedHopper(TritonBackend):
    """It attends float32. Prefill attention with windows is left to the usual kernel."""

    def __init__(self, case: AttentionCase) -> None:
        both = hopper_prefill_kernel, hopper_segment_kernel
        simulator = Simulator(*both, functions={"gdc_launch_dependents": lambda: None})
        with ExitStack() as patches:
            patches.enter_context(patch.object(prefill_choice, "prefill_kernel", _hopper_kernel))
            for module in both:
                name = module.__name__.rpartition(".")[2]
                patches.enter_context(patch.object(module, name, SimulatedKernel(simulator, name)))
            super().__init__(case)

    def decode(self, *arguments: Any) -> Tensor:
        with patch.object(tl.extra.cuda, "gdc_wait", lambda: None):  # which the interpreter has not
            return super().decode(*arguments)
