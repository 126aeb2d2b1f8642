"""WeightExecutor: an executor whose ranks change their weights between steps."""

from __future__ import annotations

from nvcli import errors
from nvcli.core.engine_config import EngineConfig
from nvcli.core.weight_changes import LoadWeights, WeightsChange, WeightsChanged
from nvcli.worker.executor.channel import ChannelClosed
from nvcli.worker.executor.executor import Executor
from nvcli.worker.executor.ranks import MODEL_RUNNER, RankAhead


class WeightExecutor(Executor):
    """An executor that remembers which weights its ranks have: those that take their place load the same."""

    def __init__(self, config: EngineConfig, runner: str = MODEL_RUNNER, ahead: RankAhead | None = None) -> None:
        super().__init__(config, runner, ahead)
        self._loaded: LoadWeights | None = None
        """The weights that took the place of the configuration's."""

    def change_weights(self, change: WeightsChange) -> WeightsChanged:
        """Send a change of the weights to all ranks, and wait for it, which may take any time. No step may be in
        flight. Raises the error of a rank that failed or died."""
        assert not self._submitted
        try:
            self._steps.send(self._encoder.encode(change))
        except ChannelClosed:
            self._ranks.raise_failure()
        changed = self._ranks.wait_changed()
        if isinstance(change, LoadWeights) and not changed.error_kind:
            self._loaded = change
        return changed

    def recover(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> int | None:
        num_blocks = super().recover(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        if num_blocks is not None and self._loaded is not None:  # these ranks are new
            changed = self.change_weights(self._loaded)
            if changed.error_kind:
                raise errors.named(changed.error_kind, changed.message)
        return num_blocks
