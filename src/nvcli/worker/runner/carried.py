"""Carried: what requests bring besides tokens, such as LoRA adapters and images, as a step of a rank meets it."""

from __future__ import annotations

from typing import Protocol

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.core.messages import StepInput
from nvcli.kernels.step_tensors import StepRows


class Carried(Protocol):
    """One kind of it, for all slots."""

    def plan(self, step: StepInput) -> bool:
        """Take in a step on the host, before its batch is made. Return whether it must run outside of graphs."""

    def apply(self, step: StepInput) -> None:
        """Bring the device's side up to date, before the rows are loaded."""

    def prepare(self, rows: StepRows, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with what its tokens have. Can run in a CUDA graph, unless `plan` says otherwise."""

    def take_note(self) -> str:
        """Return the next `StepOutput.note`; empty if there is none."""
