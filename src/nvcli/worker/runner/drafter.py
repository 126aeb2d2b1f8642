"""Drafter: the drafts of a rank's decode rows, from their lookup to the counts on their way to the host.

A step with drafts looks them up before its inputs are prepared (`find`), computes them after the last tokens, chooses a
token at every position, and keeps the correct drafts and the token after them (`keep`). If the model has a head that
drafts (`ModelDrafter`), rows have its drafts where it has any, and the head takes in the step at its end (`extend`).
All ranks do the same, from tokens that all of them have. Answers that follow a grammar have no drafts, because their
masks are built one token at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvcli.core.messages import StepInput
from nvcli.kernels.drafts import accept_drafts, accepted_of, find_drafts
from nvcli.kernels.prepare_inputs import keep_tokens
from nvcli.kernels.step_tensors import StepInputs
from nvcli.worker.runner.input_buffers import StepBatch
from nvcli.worker.runner.model_drafter import ModelDrafter
from nvcli.worker.runner.sampling_table import SamplingFlag
from nvcli.worker.runner.slot_table import SlotTable, unpack_ids


@dataclass(frozen=True, slots=True)
class PendingDrafts:
    """The numbers of a step's drafts and of its rows' tokens, on their way to the host."""

    drafted: Tensor
    """[num_decodes] int32, the number of drafts of each decode row."""
    sources: Tensor
    """[num_decodes] int32, the source of each decode row's drafts, as an index of `DRAFT_SOURCES`."""
    row_counts: Tensor
    """[rows of the batch] int32, the number of tokens that each row gives."""
    row_logits: Tensor
    """[rows of the batch] int32, the number of logits of each row."""

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of tokens of each row with logits, [n] int32, and a mask of the sampled ids that count, [N]
        bool. Call it once the step has finished."""
        num_logits: np.ndarray = self.row_logits.numpy()
        has_logits = num_logits > 0
        counts, num_logits = self.row_counts.numpy()[has_logits], num_logits[has_logits]
        ends = np.cumsum(num_logits)
        index = np.arange(ends[-1]) - np.repeat(ends - num_logits, num_logits)
        return counts, index < np.repeat(counts, num_logits)


class Drafter:
    """Drafts for the slots of one table."""

    def __init__(
        self,
        slots: SlotTable,
        model: ModelDrafter | None = None,
        *,
        max_positions: int,
        accept_rate: float | None = None,
    ) -> None:
        """`model`: drafts by a head; None: there is none. `max_positions`: the positions that the model knows.
        `accept_rate`: see `EngineConfig.draft_accept_rate`."""
        self._slots, self._model = slots, model
        self._max_positions = max_positions
        self._accepted = accepted_of(accept_rate)

    def may_draft(self, step: StepInput, batch: StepBatch) -> np.ndarray | None:
        """Tell which decode rows of a step may have drafts: those that choose without masks, [decode rows] bool; None:
        none has any."""
        if batch.drafts is None:
            return None
        slots = unpack_ids(step.slots)[: step.num_decodes]
        may: np.ndarray = (self._slots.sampling.flags_host[slots] & SamplingFlag.CONSTRAINED) == 0
        return may

    def find(self, batch: StepBatch) -> None:
        """Look up drafts to follow the last tokens of a step's rows, before the step's inputs are prepared."""
        if batch.drafts is not None:
            for_all = self._accepted >= 0
            find_drafts(batch.rows, self._slots.state, batch.drafts, self._slots.answers, for_all=for_all)
            if self._model is not None:
                self._model.propose(batch, for_all=for_all)

    def limit_positions(self, batch: StepBatch) -> None:
        """Clamp the positions of a prepared step to those that the model knows: drafts may reach beyond the longest
        answer, where they are never accepted."""
        if batch.drafts is not None:
            batch.forward.positions.clamp_(max=self._max_positions - 1)

    def keep_drafts(self, inputs: StepInputs, num_rows: int) -> None:
        """Restore the tokens that a step computed, for its first `num_rows` rows of logits, in the table where sampling
        looks up preceding tokens: an earlier choice may have stored others there."""
        ids = inputs.input_ids[inputs.logits_rows[:num_rows]]
        positions = inputs.sample_positions[:num_rows] - 1
        keep_tokens(self._slots.state.token_ids, inputs.sample_slots[:num_rows], positions, ids)

    def keep(self, batch: StepBatch, ids: Tensor, held: Tensor | None = None) -> None:
        """Store the sampled ids [N] that rows give, and drop the step's other tokens from their slots. `held`: [N]
        int32; rows whose first entry is not 0 give nothing."""
        inputs, drafts = batch.inputs, batch.drafts
        if drafts is not None:
            state, answers = self._slots.state, self._slots.answers
            accept_drafts(batch.rows, state, inputs, drafts, answers, ids, held, accepted=self._accepted)
            return
        slots = inputs.sample_slots[: len(ids)]
        self._slots.keep(slots, inputs.sample_positions[: len(ids)], ids)
        if held is not None:
            self._slots.take_back(slots, held)

    def extend(self, batch: StepBatch, states: Tensor | None) -> None:
        """Let the head take in a step whose tokens are kept. states: [T, K], what it reads of the target; None: it
        takes nothing in."""
        if states is not None:
            assert self._model is not None
            self._model.extend(batch, states)

    def to_host(
        self, step: StepInput, batch: StepBatch, ids: Tensor, copy: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, PendingDrafts | None]:
        """Start copying a step's sampled ids [N] to the host by `copy`, with what the host needs to know about its
        drafts besides: the tokens of each row, the drafts of each decode row, and their sources."""
        drafts, num_rows, num_decodes = batch.drafts, batch.forward.shape.num_rows, step.num_decodes
        if drafts is None:
            return copy(ids), None
        of_rows = drafts.counts[:num_rows], batch.rows.num_logits[:num_rows]
        host = copy(torch.cat([ids, *of_rows, drafts.num_drafts[:num_decodes], drafts.sources[:num_decodes]]))
        sizes = [len(ids), num_rows, num_rows, num_decodes, num_decodes]
        host_ids, counts, num_logits, drafted, sources = host.split_with_sizes(sizes)
        return host_ids, PendingDrafts(drafted, sources, counts, num_logits)
