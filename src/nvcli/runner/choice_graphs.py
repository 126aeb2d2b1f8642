"""ChoiceGraphs: the second part of steps whose graphs are in two parts, because masks come between them.

The graph of a step chooses its tokens in itself. Constrained rows have no masks by then, so a step with such rows would
choose twice, the second time by launches one by one. A shape that had some such steps is therefore captured anew
without the choice, in the place of its first graph, and a small second graph chooses: it waits for late masks, applies
all, samples, keeps the tokens, and takes back the rows that are held. What it needs to know of a step is brought in one
copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.forward_batch import BatchShape
from nvcli.runner.graph_runner import no_garbage_collection
from nvcli.runner.mask_memory import MaskMemory
from nvcli.runner.sampler import NO_MASK, Sampler
from nvcli.runner.slot_table import SlotTable
from nvcli.runner.step_masks import StepMasks

_STEPS_BEFORE = 32
"""Steps of a shape that choose twice before it is captured anew, which takes as long as some hundred choices."""
_PATIENCE_WORDS = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """What is chosen from: tensors at fixed addresses, for the N rows of a shape."""

    logits: Tensor
    """[N, V]"""
    slots: Tensor
    """[N] int64"""
    positions: Tensor
    """[N] int32, of the tokens to be sampled."""
    memory: MaskMemory
    """Where the masks are."""


class ChoiceGraphs:
    """The second parts of one rank's steps, none of whose logits lie on other ranks."""

    def __init__(self, sampler: Sampler, slots: SlotTable, *, max_rows: int, steps_in_flight: int) -> None:
        """`max_rows`: the most rows that a shape may have."""
        self._sampler, self._slots = sampler, slots
        self._launch: dict[BatchShape, Callable[[], tuple[Tensor, Tensor]]] = {}
        """For each shape in two parts, what chooses: it returns what `choose` does."""
        self._num_steps: Counter[BatchShape] = Counter()
        self._given_up: set[BatchShape] = set()
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        device = slots.state.lengths.device
        words = 2 * max_rows + _PATIENCE_WORDS
        self._staged = torch.empty(words, dtype=torch.int32, device=device)
        """The mask of each row, what its mask waits for, and the patience, as `take_late_masks` takes them."""
        on_gpu = device.type == "cuda"
        # A GPU's copy reads what is staged later, when the stream gets there.
        self._staging = [torch.empty(words, dtype=torch.int32, pin_memory=on_gpu) for _ in range(steps_in_flight + 2)]

    def __contains__(self, shape: BatchShape) -> bool:
        return shape in self._launch

    def is_due(self, shape: BatchShape) -> bool:
        """Count a step of a shape in one part that has constrained rows, and tell whether to capture it anew."""
        self._num_steps[shape] += 1
        return self._num_steps[shape] > _STEPS_BEFORE and shape not in self._given_up

    def give_up(self, shape: BatchShape) -> None:
        """Leave a shape in one part from now on."""
        self._given_up.add(shape)

    def add(self, shape: BatchShape, choice: Choice) -> None:
        """Capture the second part of a shape, whose first part gives the logits from now on. Nothing runs; what is
        launched was launched before."""
        self._launch[shape] = self._capture(choice) if self._staged.is_cuda else lambda: self._choose(choice)

    def choose(self, shape: BatchShape, rows: np.ndarray, masks: StepMasks | None) -> tuple[Tensor, Tensor]:
        """Choose the tokens of a step whose constrained rows [n], if any, have these masks: ids [N] int32, and what
        `take_late_masks` returns of the N rows. They hold until the next choice."""
        self._staging = self._staging[1:] + self._staging[:1]
        staged = self._staging[0].numpy()
        by_row = staged[:-_PATIENCE_WORDS].reshape(2, -1)
        if masks is None:
            by_row[0], by_row[1] = NO_MASK, 0
        else:
            by_row[:] = masks.by_row(rows, by_row.shape[1])
            staged[-_PATIENCE_WORDS:] = masks.patience
        self._staged.copy_(self._staging[0], non_blocking=True)
        return self._launch[shape]()

    def _choose(self, choice: Choice) -> tuple[Tensor, Tensor]:
        num_rows = len(choice.logits)
        mask_of, wanted = self._staged[:-_PATIENCE_WORDS].view(2, -1)[:, :num_rows]
        found = choice.memory.take_late(mask_of, wanted, self._staged[-_PATIENCE_WORDS:])
        ids = self._sampler.sample_masked(choice.logits, choice.slots, choice.positions, choice.memory.masks, mask_of)
        self._slots.keep(choice.slots, choice.positions, ids)
        self._slots.take_back(choice.slots, found[0])
        return ids, found

    def _capture(self, choice: Choice) -> Callable[[], tuple[Tensor, Tensor]]:
        if self._stream is None:
            # The pool is not that of the first parts, whose logits must stay.
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), no_garbage_collection():
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                chosen = self._choose(choice)
            finally:
                graph.capture_end()

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return chosen

        return replay
