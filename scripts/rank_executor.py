"""RankExecutor: the executor of an engine whose rank runs in the same process."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvcli.core.messages import StepInput, StepOutput
    from nvcli.core.weight_changes import WeightsChange, WeightsChanged
    from nvcli.worker.runner.interface import PendingOutput
    from nvcli.worker.runner.model_runner import ModelRunner


class RankExecutor:
    """An executor around a runner in this process; outputs are collected when the engine wants them."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._pending: deque[PendingOutput] = deque()

    def submit(self, step: StepInput) -> None:
        pending = self._runner.launch(step)
        assert pending is not None
        self._pending.append(pending)

    def collect(self) -> StepOutput:
        return self._pending.popleft().result()

    def recover(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> int | None:
        return None

    def change_weights(self, change: WeightsChange) -> WeightsChanged:
        from nvcli.worker.executor.worker import change_weights

        return change_weights(self._runner, change)
