"""Graphs for a CPU, which has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nvcli.attention.forward_batch import BatchShape
from nvcli.core.messages import StepInput
from nvcli.worker.runner.graph_runner import GraphRunner
from nvcli.worker.runner.input_buffers import StepBatch
from nvcli.worker.runner.step_results import StepLogits
from nvcli.worker.runner.step_runner import StepRunner


class LaunchedGraphs(GraphRunner[Any]):
    """What a graph would hold is launched at each replay. Of steps in two parts it leaves the logits in one place."""

    def __init__(self, shapes: list[BatchShape], steps: StepRunner) -> None:
        super().__init__(shapes, steps.run_padded)
        self.replayed: list[BatchShape] = []
        self.captured: list[BatchShape] = []
        self._kept: dict[BatchShape, torch.Tensor] = {}
        self._split: set[BatchShape] = set()
        self._steps = steps
        self._stage = steps._buffers.stage
        steps._buffers.stage = self._remember  # type: ignore[method-assign]

    def _remember(self, step: StepInput, batch: StepBatch, *of_drafts: np.ndarray | None) -> StepBatch:
        self._batch = self._stage(step, batch, *of_drafts)
        return self._batch

    def has_captured(self, shape: BatchShape) -> bool:
        return shape in self.captured

    def capture_late(self, shape: BatchShape) -> None:
        assert self._batch.forward.shape == shape, "the step's plan is made"
        self.captured.append(shape)
        if self._steps._masks.is_split(shape):
            self._split.add(shape)

    def replay(self, shape: BatchShape) -> Any:
        assert self._batch.forward.shape == shape
        self.replayed.append(shape)
        # Not run_padded: the torch backend plans with the step's host values, and could not be in a graph.
        output = self._steps._compute(self._batch, sample=shape not in self._split)
        if shape in self._kept:
            assert isinstance(output, StepLogits)
            self._kept[shape].copy_(output.logits)
        return output

    def output(self, shape: BatchShape) -> StepLogits:
        """That of a step in two parts."""
        num_rows, vocab_size = self._steps._buffers.num_logits(shape), self._steps._model.config.vocab_size
        self._kept[shape] = torch.zeros(num_rows, vocab_size)
        return StepLogits(self._kept[shape], None)
