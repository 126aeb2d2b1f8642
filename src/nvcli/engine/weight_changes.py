"""Changing a replica's weights: what the scheduler must have done before, and what it must forget after."""

from __future__ import annotations

from typing import Protocol

from nvcli.core.weight_changes import WeightsChange, WeightsChanged
from nvcli.engine.core import EngineCore
from nvcli.engine.request import RequestOutput


class ChangesWeights(Protocol):
    """An executor whose ranks can change their weights."""

    def change_weights(self, change: WeightsChange) -> WeightsChanged:
        """Change the weights on all ranks, and wait for it; no step may be in flight."""


def change_weights(
    core: EngineCore, executor: ChangesWeights, change: WeightsChange
) -> tuple[list[RequestOutput], WeightsChanged]:
    """Finish all requests, change the weights of all ranks, or their memory, and forget what was computed with them.

    Returns the outputs of these requests and the answer to the change.
    """
    outputs: list[RequestOutput] = []
    while core.has_work:
        outputs += core.step()
    changed = executor.change_weights(change)
    if not changed.error_kind:
        core.forget_prefixes()
    return outputs, changed
