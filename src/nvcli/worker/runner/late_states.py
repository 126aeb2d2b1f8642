"""LateStates: the recurrent states of a rank's requests between steps with drafts (`kernels/kept_inputs.py`).

A step with drafts leaves the states of its rows without its tokens. The next such step of the same rows adds them; they
are added before any other step, whatever that does with the requests and their blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from nvcli.attention.kept_states import KeptStates
from nvcli.attention.kv_cache import KVCache
from nvcli.core.messages import StepInput
from nvcli.worker.runner.input_buffers import StepBatch
from nvcli.worker.runner.slot_table import unpack_ids

_NO_SLOTS: np.ndarray = np.zeros(0, dtype=np.int64)


class LateStates:
    """The states of one KV cache."""

    def __init__(
        self,
        kept: KeptStates | None,
        kv_cache: KVCache,
        upload: Callable[[np.ndarray], tuple[Tensor, ...]],
    ) -> None:
        """`kept`: None if the model has no recurrent states, or its rows no drafts."""
        self.kept, self._kv_cache, self._upload = kept, kv_cache, upload
        self._slots = _NO_SLOTS
        """The slots of the rows of the last step with drafts, in order; none if all states are up to date."""

    def begin(self, step: StepInput, batch: StepBatch) -> np.ndarray | None:
        """Bring states up to date for a step, other than those that it advances itself. Returns
        `ForwardBatch.earlier_rows` of its decode rows; None: they were not in the last step with drafts."""
        if self.kept is None or not len(self._slots):
            return None
        last, self._slots = self._slots, _NO_SLOTS
        # A slot that is filled again has no earlier row.
        goes_on = batch.drafts is not None and not step.new_slots
        slots = unpack_ids(step.slots)[: step.num_decodes] if goes_on else _NO_SLOTS
        late = np.flatnonzero(~np.isin(last, slots))
        if len(late):
            self.kept.advance(self._kv_cache, *self._upload(late))
        rows = np.full(max(last.max(), slots.max(initial=0)) + 1, -1, dtype=np.int32)
        rows[last] = np.arange(len(last))
        earlier: np.ndarray = rows[slots]
        return earlier if goes_on else None

    def end(self, step: StepInput, batch: StepBatch) -> None:
        """End a step, once it is known on the device how many tokens of each row count."""
        if self.kept is not None and batch.drafts is not None:
            self.kept.keep(self._kv_cache, batch.forward.state_rows, batch.drafts.counts)
            self._slots = unpack_ids(step.slots)[: step.num_decodes]
