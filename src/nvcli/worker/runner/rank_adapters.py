"""RankAdapters: the LoRA adapters that rows choose from, on one rank.

Those with places on the device are multiplied beside the weights of each step, and those that take turns are merged
into the weights. A request arrives with the place of its adapter, and its slot keeps it. Before the forward pass every
token gets the place of its slot, and tokens are sorted by adapter. Apart from the engine's changes, all of this happens
on the device at fixed addresses, so that one graph serves any mix of adapters. Steps whose rows have none launch
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import NO_ADAPTER, StepInput
from nvcli.core.validation import shorten
from nvcli.errors import LoadError
from nvcli.kernels.lora import group_rows
from nvcli.kernels.lora_types import BatchAdapters
from nvcli.kernels.step_tensors import StepRows
from nvcli.models.adapter_bank import LoadedAdapters
from nvcli.models.adapters.adapter import Adapter
from nvcli.models.causal_lm import CausalLM
from nvcli.models.merged_weights import MergedWeights
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from nvcli.worker.runner.memory import host_bytes_for_adapters, places_that_fit
from nvcli.worker.runner.slot_table import SlotTable, unpack_ids
from nvcli.worker.runner.uploader import SlotNumbers

_READING_THREADS = 4
"""Threads that read adapters ahead of use."""
_MAX_NOTE = 300
"""Maximum characters of a note (`StepOutput.note`)."""


class RankAdapters:
    """The adapters of one rank, the memory that they take there, and the adapter of each slot."""

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        adapters: Mapping[int, Adapter],
        slots: SlotTable,
        device: torch.device,
        world: TensorParallelGroup,
        dtype: torch.dtype,
    ) -> None:
        """Make places for the adapters that need them, as many on all ranks of the `world`. `adapters` are by number,
        counted from 1; steps have none if it is empty."""
        self._config, self._model, self._adapters = config, model, adapters
        self.num_places = 0
        self.num_bytes = 0
        """Bytes on the device, including the base of weights into which adapters are merged."""
        self._loaded: LoadedAdapters | None = None
        """The adapters with places; None: there are none."""
        self._merged: MergedWeights | None = None
        """The weights into which adapters are merged in turn; None: none are."""
        self._notes: list[str] = []
        if not adapters:
            return
        if config.placed_adapters:
            placed = {number: adapters[number] for number in config.placed_adapters}
            self._loaded = loaded = LoadedAdapters(model, placed, dtype, max_host_bytes=host_bytes_for_adapters(config))
            self.num_places = world.min(places_that_fit(config, loaded.num_bytes, device))
            loaded.make_places(self.num_places)
            loaded.on_host.read_ahead(_READING_THREADS)
            self.num_bytes = loaded.num_bytes(self.num_places)
        num_slots, max_tokens = len(slots.state.lengths), config.max_padded_tokens
        self._places = SlotNumbers(num_slots, max_tokens, slots.upload, device, unset=NO_ADAPTER)

    def keep_base_weights(self) -> str:
        """Keep the base of the weights into which adapters are merged in turn, once these are loaded. Return a note
        for the user."""
        config = self._config
        self._merged = merged = MergedWeights(
            self._model,
            None if config.load_format == "dummy" else config.model_path,
            {number: self._adapters[number] for number in config.merged_adapters},
            max_host_bytes=host_bytes_for_adapters(config),
            num_ranks=config.num_ranks_here,
        )
        if merged.place == "device":
            self.num_bytes += merged.num_bytes
        return merged.note

    # ------------------------------------------------------------------ steps (`interface.RequestExtras`)

    def plan(self, step: StepInput) -> bool:
        """Return False: graphs serve all steps."""
        return False

    def apply(self, step: StepInput) -> None:
        """Load and merge adapters, and record the adapters of slots. Rows of an adapter that cannot be read get no
        finite logits."""
        if step.merged_adapter is not None:
            assert self._merged is not None
            self._tell(self._merged.merge(step.merged_adapter))
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
        tokens = group_rows(of_tokens, bank, batch_invariant=self._config.batch_invariant)
        if batch.logits_rows is None:
            return BatchAdapters(tokens, tokens)
        kept = group_rows(of_tokens[batch.logits_rows], bank, batch_invariant=self._config.batch_invariant)
        return BatchAdapters(tokens, kept)
