"""InputBuffers: the tensors that a step reads, at fixed addresses and large enough for every step.

CUDA graphs and eager runs read the same ones. `load` brings a step's rows there, padded to a graph's shape if one is to
run; `prepare_inputs` then fills the rest on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.backend import AttentionBackend
from nvcli.attention.forward_batch import BatchShape, ForwardBatch
from nvcli.attention.kept_states import KeptStates
from nvcli.attention.kv_cache import KVCache
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import StepInput
from nvcli.kernels.chunk_prefixes import ChunkPrefixes
from nvcli.kernels.prepare_inputs import prepare_inputs
from nvcli.kernels.segment_tables import SegmentTables
from nvcli.kernels.step_tensors import DraftRows, SlotState, StepInputs, StepRows
from nvcli.kernels.whole_numbers import round_up
from nvcli.worker.runner.slot_table import unpack_ids
from nvcli.worker.runner.uploader import PinnedRing, to_device

OfRows = np.ndarray | None
"""A number for each decode row of a step; None: the usual."""


def exact_shape(step: StepInput) -> BatchShape:
    """Return the shape of a step without padding."""
    num_tokens = unpack_ids(step.num_tokens)
    num_decodes = step.num_decodes
    widths = num_tokens[:num_decodes]
    most = int(widths.max(initial=1))
    return BatchShape(
        decode_rows=num_decodes,
        tokens_per_row=most,
        uneven_tokens=step.draft_tokens or (0 if (widths == most).all() else int(widths.sum())),
        prefill_rows=len(num_tokens) - num_decodes,
        prefill_tokens=int(num_tokens[num_decodes:].sum()),
        shares_segments=step.shares_segments,
        shares_prefixes=bool(step.shared_prefixes),
        has_adapters=step.has_adapters,
        extends_drafts=step.extends_drafts,
    )


_ALIGN = 32
"""int32 words: the row tensors start at 128 bytes, so that kernels see one alignment."""
_STEP_FIELDS, _PREFIX_FIELDS, _ROW_FIELDS = 5, 7, 10
"""int32 words of a row: the fields of `StepRows`, with those of `ChunkPrefixes`, which few steps have, and with
`ForwardBatch.earlier_rows` and the first two of `DraftRows`."""
_NO_LIMIT = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Views of the buffers for one step. N rows are kept for logits; the step uses the first `num_sampled` of them."""

    rows: StepRows
    inputs: StepInputs
    forward: ForwardBatch
    sampled_slots: np.ndarray
    """[num_sampled] on the host, in batch order: the slot that each of the first rows of logits samples for."""
    drafts: DraftRows | None = None
    """The drafts of decode rows; None: they have none."""
    is_first: np.ndarray | None = None
    """[num_sampled] bool on the host, the first of each row's rows of logits, where decode rows have drafts."""
    own: StepBatch | None = None
    """The rows that `forward` covers, if ranks compute the attention of different rows (`HomeBuffers`); `rows` and
    `inputs` then cover all rows. None: all ranks compute all rows."""

    @property
    def num_sampled(self) -> int:
        return len(self.sampled_slots)


class InputBuffers:
    """Buffers for the largest steps of a configuration, padded ones included."""

    def __init__(self, state: SlotState, config: EngineConfig, *, times: int = 1) -> None:
        """`times`: the number of such steps that they hold."""
        device = state.lengths.device
        self._state = state
        self._max_logits = max_logits = times * config.max_step_logits
        max_rows, max_tokens = times * config.max_padded_rows, times * config.max_padded_tokens

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._inputs = StepInputs(
            input_ids=ints(max_tokens),
            positions=ints(max_tokens),
            slot_mapping=ints(state.block_tables.shape[0], max_tokens, dtype=torch.int64),
            slots=ints(max_rows + 1, dtype=torch.int64),
            seq_lens=ints(max_rows + 1),
            logits_rows=ints(max_logits, dtype=torch.int64),
            sample_slots=ints(max_logits, dtype=torch.int64),
            sample_positions=ints(max_logits),
        )
        self._draft_counts = ints(4, max_rows + 1)
        words = _ROW_FIELDS * _aligned(max_rows + 2)
        self._rows = ints(words)
        self._staging = PinnedRing(words, device, steps_in_flight=config.max_steps_in_flight)

    def choose_shape(self, step: StepInput, backend: AttentionBackend) -> BatchShape:
        """Return the shape of a step's forward pass without padding, as a backend chooses it."""
        return backend.choose_shape(exact_shape(step), unpack_ids(step.num_tokens), unpack_ids(step.seq_lens))

    def own_step(self, step: StepInput) -> StepInput:
        """Return the step with only those new blocks that are in this rank's KV cache."""
        return step

    def kept_logits(self, step: StepInput, shape: BatchShape) -> tuple[int, bool]:
        """Return how many rows are kept for logits in an eager step of this shape, and whether these are all of its
        tokens."""
        num_logits = step.draft_tokens or int(unpack_ids(step.num_logits).sum())
        return num_logits, num_logits == shape.num_tokens

    def keeping(self, step: StepInput, forward: ForwardBatch, tokens: np.ndarray) -> ForwardBatch:
        """Return the batch of a step without padding, changed to keep the hidden states of `tokens` [M], ascending, in
        place of those of the rows that need logits."""
        return replace(forward, logits_rows=to_device(tokens.astype(np.int64), forward.positions.device))

    def num_logits(self, shape: BatchShape) -> int:
        """Return the rows kept for logits in a padded batch: at most one for each slot, or one for each token of decode
        rows with drafts."""
        return min(shape.decode_tokens + shape.prefill_rows, self._max_logits)

    def batch(
        self,
        shape: BatchShape,
        num_logits: int,
        kv_cache: KVCache,
        backend: AttentionBackend,
        *,
        needs_all_logits: bool,
        segments: SegmentTables | None = None,
        kept_states: KeptStates | None = None,
    ) -> StepBatch:
        """Make views of the buffers for a batch of this shape, whose host values are those of padding alone.

        segments: the tables of the segments that requests share, for a shape that shares any. kept_states: what layers
        with recurrent states keep of rows with drafts, for a shape that has any.

        needs_all_logits: every token needs logits, so that the N rows are the T tokens, in order.
        """
        num_rows, num_tokens = shape.num_rows, shape.num_tokens
        size = _aligned(num_rows + 2)
        fields = self._rows[: _ROW_FIELDS * size].view(-1, size)
        slots, counts, num_logits_of, starts, kept, ends, group_ends, earlier, limits, most_drafts = fields
        rows = StepRows(
            slots=slots[: num_rows + 1],
            num_tokens=counts[: num_rows + 1],
            num_logits=num_logits_of[: num_rows + 1],
            query_start_loc=starts[: num_rows + 2],
            logits_start_loc=kept[: num_rows + 2],
        )
        inputs = self._inputs._replace(
            logits_rows=self._inputs.logits_rows[:num_logits],
            sample_slots=self._inputs.sample_slots[:num_logits],
            sample_positions=self._inputs.sample_positions[:num_logits],
        )
        forward = ForwardBatch(
            shape=shape,
            input_ids=inputs.input_ids[:num_tokens],
            positions=inputs.positions[:num_tokens],
            slot_mapping=inputs.slot_mapping[:, :num_tokens],
            slots=inputs.slots[:num_rows],
            block_tables=self._state.block_tables,
            seq_lens=inputs.seq_lens[:num_rows],
            query_start_loc=rows.query_start_loc[: num_rows + 1],
            logits_rows=None if needs_all_logits else inputs.logits_rows,
            num_tokens_host=np.zeros(num_rows, dtype=np.int32),
            seq_lens_host=np.zeros(num_rows, dtype=np.int32),
            kv_cache=kv_cache,
            backend=backend,
            segments=segments if shape.shares_segments else None,
            kept_states=kept_states if shape.tokens_per_row > 1 else None,
            earlier_rows=earlier[:num_rows] if shape.tokens_per_row > 1 else None,
            prefixes=ChunkPrefixes(ends=ends[:num_rows], group_ends=group_ends[:num_rows])
            if shape.shares_prefixes
            else None,
        )
        drafts = None
        if shape.tokens_per_row > 1:
            filled_in = self._draft_counts[:, : num_rows + 1]
            drafts = DraftRows(limits[: num_rows + 1], most_drafts[: num_rows + 1], *filled_in)
        return StepBatch(rows=rows, inputs=inputs, forward=forward, sampled_slots=np.zeros(0, np.int32), drafts=drafts)

    def stage(self, step: StepInput, batch: StepBatch, may_draft: OfRows = None, earlier: OfRows = None) -> StepBatch:
        """Lay out the step's rows for the batch on the host; `load` copies them to the device. `may_draft`: [decode
        rows] bool, which of the step's decode rows may have drafts; None: all. `earlier`: [decode rows], see
        `ForwardBatch.earlier_rows`; None: none was in the last step with drafts."""
        shape, num_decodes = batch.forward.shape, step.num_decodes
        num_rows, first_prefill = shape.num_rows, shape.decode_rows
        places = np.arange(step.num_rows)
        places[num_decodes:] += first_prefill - num_decodes
        step_slots, step_tokens = unpack_ids(step.slots), unpack_ids(step.num_tokens)
        step_logits, most_tokens = unpack_ids(step.num_logits), step_tokens[:num_decodes]
        if step.draft_tokens:
            step_tokens = step_logits = np.diff(np.arange(num_decodes + 1) * step.draft_tokens // num_decodes)

        size = _aligned(num_rows + 2)
        staged = self._staging.next().numpy()[: _num_fields(shape) * size].reshape(-1, size)
        staged[:] = 0
        slots, num_tokens, num_logits, starts, kept = staged[:_STEP_FIELDS]
        slots[: num_rows + 1] = self._state.padding_slot
        slots[places] = step_slots
        num_padding = first_prefill - num_decodes
        # Padding is spread evenly, so that no row has more than `tokens_per_row`.
        padding = np.arange(num_padding + 1) * (shape.decode_tokens - step_tokens[:num_decodes].sum())
        num_tokens[num_decodes:first_prefill] = np.diff(padding // max(1, num_padding))
        num_tokens[places] = step_tokens
        num_tokens[num_rows] = shape.num_tokens - num_tokens[:num_rows].sum()
        num_logits[places] = step_logits
        np.cumsum(num_tokens[: num_rows + 1], out=starts[1 : num_rows + 2])
        np.cumsum(num_logits[: num_rows + 1], out=kept[1 : num_rows + 2])
        kept[num_rows + 1] = len(batch.inputs.logits_rows)  # the rest is padding
        if shape.shares_prefixes:
            ends, group_ends = staged[_STEP_FIELDS:_PREFIX_FIELDS]
            group_ends[:num_rows] = np.arange(num_rows)
            for row, count, num_keys in unpack_ids(step.shared_prefixes).reshape(-1, 3):
                first = row + first_prefill - num_decodes
                ends[first : first + count] = num_keys
                group_ends[first] = first + count

        seq_lens = num_tokens[:num_rows].copy()
        seq_lens[places] = unpack_ids(step.seq_lens)
        forward = replace(batch.forward, num_tokens_host=num_tokens[:num_rows].copy(), seq_lens_host=seq_lens)
        sampled_slots = np.repeat(step_slots, step_logits)
        if batch.drafts is None:
            return replace(batch, forward=forward, sampled_slots=sampled_slots)
        earlier_rows, limits, most_drafts = staged[_PREFIX_FIELDS:]
        earlier_rows[:], limits[:] = -1, _NO_LIMIT
        earlier_rows[:num_decodes] = -1 if earlier is None else earlier
        if step.row_limits:
            limits[:num_decodes] = unpack_ids(step.row_limits)
        most_drafts[:num_decodes] = most_tokens - 1
        if may_draft is not None:
            most_drafts[:num_decodes] *= may_draft
        is_first = np.zeros(len(sampled_slots), dtype=np.bool_)
        is_first[(np.cumsum(step_logits) - step_logits)[step_logits > 0]] = True
        return replace(batch, forward=forward, sampled_slots=sampled_slots, is_first=is_first)

    def load(self, batch: StepBatch, *, keeps_layout: bool = False) -> None:
        """Copy the staged rows to the device, without waiting for the copy. `keeps_layout`: rows keep the number of
        tokens that they are staged with, however sure a head is of their drafts."""
        shape = batch.forward.shape
        if keeps_layout and batch.drafts is not None:
            staged = self._staging.latest.numpy()[: _ROW_FIELDS * _aligned(shape.num_rows + 2)].reshape(_ROW_FIELDS, -1)
            np.minimum(staged[-1], np.maximum(staged[1] - 1, 0), out=staged[-1])
        words = _num_fields(shape) * _aligned(shape.num_rows + 2)
        self._rows[:words].copy_(self._staging.latest[:words], non_blocking=True)

    def prepare(self, batch: StepBatch) -> None:
        """Fill the inputs of the loaded rows on the device."""
        prepare_inputs(batch.rows, self._state, batch.inputs)


def _num_fields(shape: BatchShape) -> int:
    """Return the number of row fields that a step copies to the device."""
    if shape.tokens_per_row > 1:
        return _ROW_FIELDS
    return _PREFIX_FIELDS if shape.shares_prefixes else _STEP_FIELDS


def _aligned(words: int) -> int:
    return round_up(words, _ALIGN)
