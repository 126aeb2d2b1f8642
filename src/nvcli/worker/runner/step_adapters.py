"""StepAdapters: brings the LoRA adapters of a step's requests from the engine's message to the rows of linear layers.

A request arrives with the place of its adapter on the device, and its slot keeps it. Before the forward pass every
token gets the place of its slot, and tokens are sorted by adapter. Apart from the engine's changes, all of this happens
on the device at fixed addresses, so that one graph serves any mix of adapters. Steps whose rows have none launch
nothing.
"""

from __future__ import annotations

from dataclasses import replace

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.core.messages import NO_ADAPTER, StepInput
from nvcli.core.validation import shorten
from nvcli.errors import LoadError
from nvcli.kernels.lora import group_rows
from nvcli.kernels.lora_types import BatchAdapters
from nvcli.kernels.step_tensors import StepRows
from nvcli.models.adapter_bank import LoadedAdapters
from nvcli.models.merged_weights import MergedWeights
from nvcli.worker.runner.slot_table import SlotTable, unpack_ids
from nvcli.worker.runner.uploader import SlotNumbers

_MAX_NOTE = 300
"""Maximum characters of a note (`StepOutput.note`)."""


class StepAdapters:
    """The adapter of each slot, and the adapters on the device."""

    def __init__(
        self,
        loaded: LoadedAdapters | None,
        slots: SlotTable,
        *,
        max_tokens: int,
        batch_invariant: bool,
    ) -> None:
        """`loaded` None: no request has an adapter at a place."""
        self._loaded, self._batch_invariant = loaded, batch_invariant
        self.merged: MergedWeights | None = None
        """The weights into which adapters are merged in turn; None: none are."""
        lengths = slots.state.lengths
        self._places = SlotNumbers(len(lengths), max_tokens, slots.upload, lengths.device, unset=NO_ADAPTER)
        self._notes: list[str] = []

    def plan(self, step: StepInput) -> bool:
        """Return False: graphs serve all steps."""
        return False

    def apply(self, step: StepInput) -> None:
        """Load and merge adapters, and record the adapters of slots. Rows of an adapter that cannot be read get no
        finite logits."""
        if step.merged_adapter is not None:
            assert self.merged is not None
            self._tell(self.merged.merge(step.merged_adapter))
        for place, number in unpack_ids(step.adapter_loads).reshape(-1, 2).tolist():
            assert self._loaded is not None
            self._tell(self._loaded.load(place, number))
        moves = unpack_ids(step.adapter_moves).reshape(-1, 2)
        places: dict[int, int] = dict(zip(*moves.T.tolist(), strict=True))
        self._places.set(places | {new.slot: new.adapter_place for new in step.new_slots})

    def _tell(self, problem: LoadError | None) -> None:
        if problem is not None:
            self._notes.append(shorten(f"warning: rows of an adapter fail: {problem}", _MAX_NOTE))

    def take_note(self) -> str:
        """Return the next `StepOutput.note` about adapters; empty if there is none."""
        return self._notes.pop(0) if self._notes else ""

    def prepare(self, rows: StepRows, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with its tokens sorted by adapter, if it has any. Can run in a CUDA graph."""
        return replace(batch, adapters=self._sorted(rows, batch)) if batch.shape.has_adapters else batch

    def _sorted(self, rows: StepRows, batch: ForwardBatch) -> BatchAdapters:
        assert self._loaded is not None
        of_tokens = self._places.of_tokens(rows, batch.num_tokens)
        bank = self._loaded.bank
        tokens = group_rows(of_tokens, bank, batch_invariant=self._batch_invariant)
        if batch.logits_rows is None:
            return BatchAdapters(tokens, tokens)
        kept = group_rows(of_tokens[batch.logits_rows], bank, batch_invariant=self._batch_invariant)
        return BatchAdapters(tokens, kept)
