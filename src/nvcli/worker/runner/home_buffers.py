"""HomeBuffers: the inputs of a rank that computes the attention of one home's rows (`engine.homes`).

Every rank gets whole steps and lays each of them out twice: the rows of its own home, which its attention computes, and
all rows in the step's order, for which all ranks sample alike. Their hidden states are gathered rank by rank, and then
put in order (`ForwardBatch.gathered_rows`).

Every rank pads its own rows to the same shape, which has as many rows and tokens of each kind as the home with the most
of them. It works that out from the step; nobody is asked. So collectives have equal sizes on all ranks, a home without
rows takes part in every step, and all ranks take the same graph.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import torch

from nvcli.attention.backend import AttentionBackend
from nvcli.attention.forward_batch import BatchShape, ForwardBatch
from nvcli.attention.kv_cache import KVCache
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import StepInput
from nvcli.kernels.prepare_inputs import prepare_inputs
from nvcli.kernels.step_tensors import SlotState
from nvcli.worker.runner.input_buffers import InputBuffers, OfRows, StepBatch, exact_shape
from nvcli.worker.runner.slot_table import unpack_ids
from nvcli.worker.runner.uploader import PinnedRing, to_device


class HomeBuffers(InputBuffers):
    """The buffers for all rows, beside others for those of one home."""

    def __init__(self, state: SlotState, config: EngineConfig, home: int) -> None:
        self._home, self._num_homes = home, config.num_homes
        self._own = InputBuffers(state, config.of_home)
        super().__init__(state, config.of_home, times=self._num_homes)
        device, most = state.lengths.device, self._max_logits
        self._places = torch.zeros(most, dtype=torch.int64, device=device)
        """The place of each kept row among those of all homes."""
        in_flight = config.max_steps_in_flight
        self._staged_places = PinnedRing(most, device, steps_in_flight=in_flight, dtype=torch.int64)

    def choose_shape(self, step: StepInput, backend: AttentionBackend) -> BatchShape:
        homes = [rows_of_home(step, home, self._num_homes) for home in range(self._num_homes)]
        shapes = [exact_shape(own) for own in homes]
        with_chunks = [
            backend.choose_shape(shape, unpack_ids(own.num_tokens), unpack_ids(own.seq_lens))
            for shape, own in zip(shapes, homes, strict=True)
            if shape.prefill_rows
        ]
        return BatchShape(
            decode_rows=max(shape.decode_rows for shape in shapes),
            prefill_rows=max(shape.prefill_rows for shape in shapes),
            prefill_tokens=max(shape.prefill_tokens for shape in shapes),
            projects_latents=bool(with_chunks) and all(shape.projects_latents for shape in with_chunks),
        )

    def own_step(self, step: StepInput) -> StepInput:
        return blocks_of_home(step, self._home, self._num_homes)

    def num_logits(self, shape: BatchShape) -> int:
        return self._num_homes * self._own.num_logits(shape)

    def kept_logits(self, step: StepInput, shape: BatchShape) -> tuple[int, bool]:
        return self.num_logits(shape), shape.prefill_rows == 0

    def keeping(self, step: StepInput, forward: ForwardBatch, tokens: np.ndarray) -> ForwardBatch:
        shape, num_homes = forward.shape, self._num_homes
        num_tokens, slots = unpack_ids(step.num_tokens), unpack_ids(step.slots)
        row_of_token = np.repeat(np.arange(len(slots)), num_tokens)
        homes, rows = slots[row_of_token[tokens]] % num_homes, row_of_token[tokens]
        kept = np.bincount(homes, minlength=num_homes)
        own, places = np.zeros(kept.max(), dtype=np.int64), np.zeros(len(tokens), dtype=np.int64)
        for home in range(num_homes):
            at = np.flatnonzero(homes == home)
            places[at] = home * len(own) + np.arange(len(at))
        # A home's chunks come after as many decode rows as any home has.
        at_home = slots % num_homes == self._home
        is_chunk = np.arange(len(slots)) >= step.num_decodes
        starts = np.zeros(len(slots), dtype=np.int64)
        for first, part in ((0, at_home & ~is_chunk), (shape.decode_tokens, at_home & is_chunk)):
            starts[part] = first + np.cumsum(num_tokens[part]) - num_tokens[part]
        is_own = homes == self._home
        offsets = tokens - (np.cumsum(num_tokens) - num_tokens)[rows]
        own[: kept[self._home]] = (starts[rows] + offsets)[is_own]
        device = forward.positions.device
        return replace(forward, logits_rows=to_device(own, device), gathered_rows=to_device(places, device))

    def batch(
        self,
        shape: BatchShape,
        num_logits: int,
        kv_cache: KVCache,
        backend: AttentionBackend,
        *,
        needs_all_logits: bool,
        **others: object,
    ) -> StepBatch:
        own = self._own.batch(
            shape, num_logits // self._num_homes, kv_cache, backend, needs_all_logits=needs_all_logits
        )
        everyone = super().batch(self._of_all(shape), num_logits, kv_cache, backend, needs_all_logits=False)
        forward = replace(own.forward, gathered_rows=self._places[:num_logits])
        return replace(everyone, forward=forward, own=replace(own, forward=forward))

    def stage(self, step: StepInput, batch: StepBatch, may_draft: OfRows = None, earlier: OfRows = None) -> StepBatch:
        assert batch.own is not None
        shape = batch.own.forward.shape
        own = self._own.stage(rows_of_home(step, self._home, self._num_homes), batch.own)
        everyone = super().stage(step, replace(batch, forward=replace(batch.forward, shape=self._of_all(shape))))
        self._stage_places(step, shape)
        return replace(everyone, forward=own.forward, own=own)

    def _stage_places(self, step: StepInput, shape: BatchShape) -> None:
        """Work out where each row of logits of a step is among the kept rows of all homes."""
        homes = np.repeat(unpack_ids(step.slots) % self._num_homes, unpack_ids(step.num_logits))
        places = self._staged_places.next().numpy()
        places[:] = 0
        each = self._own.num_logits(shape)
        for home in range(self._num_homes):
            of_home = np.flatnonzero(homes == home)
            places[of_home] = home * each + np.arange(len(of_home))

    def load(self, batch: StepBatch, *, keeps_layout: bool = False) -> None:
        assert batch.own is not None
        self._own.load(batch.own)
        super().load(replace(batch, forward=replace(batch.forward, shape=self._of_all(batch.forward.shape))))
        count = len(batch.inputs.logits_rows)
        self._places[:count].copy_(self._staged_places.latest[:count], non_blocking=True)

    def prepare(self, batch: StepBatch) -> None:
        assert batch.own is not None
        # Lengths must advance only once.
        before = replace(self._state, lengths=self._state.lengths.clone())
        prepare_inputs(batch.own.rows, before, batch.own.inputs)
        super().prepare(batch)

    def _of_all(self, shape: BatchShape) -> BatchShape:
        """Return a shape that holds the rows of all homes, if each home's fit `shape`."""
        return BatchShape(
            decode_rows=self._num_homes * shape.decode_rows,
            prefill_rows=self._num_homes * shape.prefill_rows,
            prefill_tokens=self._num_homes * shape.prefill_tokens,
        )


def rows_of_home(step: StepInput, home: int, num_homes: int) -> StepInput:
    """Return a step with the rows of one home only."""
    slots = unpack_ids(step.slots)
    is_own = slots % num_homes == home
    return msgspec.structs.replace(
        step,
        slots=slots[is_own].tobytes(),
        num_tokens=_packed(step.num_tokens, is_own),
        num_logits=_packed(step.num_logits, is_own),
        seq_lens=_packed(step.seq_lens, is_own),
        num_decodes=int(is_own[: step.num_decodes].sum()),
    )


def blocks_of_home(step: StepInput, home: int, num_homes: int) -> StepInput:
    """Return a step with the new blocks of one home only."""
    is_own = unpack_ids(step.block_slots) % num_homes == home
    return msgspec.structs.replace(
        step,
        block_groups=_packed(step.block_groups, is_own),
        block_slots=_packed(step.block_slots, is_own),
        block_columns=_packed(step.block_columns, is_own),
        block_ids=_packed(step.block_ids, is_own),
    )


def _packed(numbers: bytes, kept: np.ndarray) -> bytes:
    packed: bytes = unpack_ids(numbers)[kept].tobytes()
    return packed
