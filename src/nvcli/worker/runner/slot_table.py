"""SlotTable: the state of the requests that a rank serves, on the device (SGLang's request-to-token pool).

A slot is one request's row, from admission to release. The last row is the padding slot: it belongs to no request and
its blocks are all the null block.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.kv_cache import NULL_BLOCK
from nvcli.core.engine_config import ANSWER_TABLE_BYTES, EngineConfig
from nvcli.core.messages import MOST_KEY_COPIES, NewSlot, StepInput
from nvcli.kernels.answer_table import empty_answer_table, forget_answers, refill_answers
from nvcli.kernels.key_copies import COPY_FIELDS, KeyCopies
from nvcli.kernels.prepare_inputs import keep_tokens, write_tokens
from nvcli.kernels.segment_tables import SEGMENT_FIELDS, SegmentTables
from nvcli.kernels.slot_filling import begin_slots
from nvcli.kernels.step_tensors import SlotState
from nvcli.worker.runner.sampling_table import SamplingTable
from nvcli.worker.runner.uploader import Uploader

_INTS_PER_NEW_SLOT = 66
"""An upper bound on the int32 words uploaded per new slot: its number, its length, its sampling parameters, the rows
that the sampler names, and the place of its adapter."""


def unpack_ids(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Read packed int32 numbers of a message as an array, without a copy."""
    return np.frombuffer(data, dtype=np.int32)


class SlotTable:
    """The tables of all slots on the device, and the methods that change them between steps."""

    def __init__(self, config: EngineConfig, num_groups: int, device: torch.device) -> None:
        """`num_groups` is the number of the model's KV groups."""
        num_rows = config.max_num_seqs + 1
        self.state = SlotState(
            lengths=torch.zeros(num_rows, dtype=torch.int32, device=device),
            token_ids=torch.zeros(num_rows, config.max_row_tokens, dtype=torch.int32, device=device),
            block_tables=torch.full(
                (num_groups, num_rows, config.max_blocks_per_seq), NULL_BLOCK, dtype=torch.int32, device=device
            ),
            block_size=config.block_size,
        )
        self.segments = SegmentTables.empty(num_groups, config.max_num_seqs, num_rows, device)
        """The segments of KV blocks that requests share."""
        # All stages must draft alike, and only the last one has an answer's tokens as soon as they are sampled.
        drafts_answers = config.max_draft_tokens and config.pipeline_parallel_size == 1
        self.answers = empty_answer_table(ANSWER_TABLE_BYTES, num_rows, device) if drafts_answers else None
        """The tokens that followed runs of tokens in answers; None if none of them is drafted."""
        self.sampling = SamplingTable(config.max_num_seqs, device)
        # In each group, a slot may have other blocks in all columns, another segment and its entry, and copied keys.
        per_group = 2 * config.max_blocks_per_seq + 6 + 2 * SEGMENT_FIELDS + MOST_KEY_COPIES * COPY_FIELDS
        per_slot = num_groups * per_group + _INTS_PER_NEW_SLOT + config.max_draft_tokens
        num_words = 2 * config.most_step_tokens + config.max_model_len + config.max_num_seqs * (per_slot + 1)
        self.upload = Uploader(num_words, device, steps_in_flight=config.max_steps_in_flight)
        """Uploads the changes between steps, and the row numbers that the sampler needs."""

    def apply(self, step: StepInput) -> None:
        """Apply the changes since the last step: new slots, blocks, and tokens that this rank does not have."""
        if step.restarts and self.answers is not None:
            forget_answers(self.answers)  # the ranks may have come to different points of the step that failed
        if step.new_slots:
            self._fill(step.new_slots)
        if step.block_ids:
            self._set_blocks(step)
        if step.segments or step.slot_segments:
            self._set_segments(step)
        if step.token_ids:
            counts = unpack_ids(step.token_counts)
            offsets = np.zeros(len(counts) + 1, dtype=np.int32)
            np.cumsum(counts, out=offsets[1:])
            slots, starts = unpack_ids(step.token_slots), unpack_ids(step.token_starts)
            write_tokens(self.state.token_ids, *self.upload(slots, starts, offsets, unpack_ids(step.token_ids)))

    def set_lengths(self, step: StepInput) -> None:
        """Set the lengths of a step's requests to what the engine knows exactly: stages other than the last do not
        learn how many drafts of an earlier step were right."""
        before = unpack_ids(step.seq_lens) - unpack_ids(step.num_tokens)
        slots, lengths = self.upload(unpack_ids(step.slots), before)
        self.state.lengths[slots.long()] = lengths

    def take_back(self, slots: Tensor, counts: Tensor) -> None:
        """Make slots forget the last tokens that they computed: `counts` [n] of them in `slots` [n], int32. The next
        step recomputes them."""
        self.state.lengths.index_add_(0, slots, counts, alpha=-1)

    def keep(self, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
        """Store sampled ids where the next step reads its input. All [N]; slots int64."""
        keep_tokens(self.state.token_ids, slots, positions, ids)

    def key_copies(self, step: StepInput) -> KeyCopies:
        """Upload a step's key copies to the device."""
        copies = unpack_ids(step.key_copies).reshape(-1, 1 + COPY_FIELDS)
        num_groups = len(self.state.block_tables)
        starts = np.searchsorted(copies[:, 0], np.arange(num_groups + 1)).tolist()
        (uploaded,) = self.upload(copies[:, 1:].ravel())
        entries = uploaded.view(-1, COPY_FIELDS)
        return KeyCopies(entries=entries, of_groups=[entries[start:end] for start, end in pairwise(starts)])

    def _fill(self, new_slots: list[NewSlot]) -> None:
        slots = np.array([new.slot for new in new_slots])
        lengths = np.array([new.num_cached_tokens for new in new_slots])
        prompt_lens = np.array([new.sampling.prompt_len for new in new_slots])
        uploaded_slots, uploaded_lengths, uploaded_prompts = self.upload(slots, lengths, prompt_lens)
        if self.answers is not None:
            refill_answers(self.answers, self.state, uploaded_slots, uploaded_prompts)
        begin_slots(self.state, uploaded_slots, uploaded_lengths, null_block=NULL_BLOCK)
        self.sampling.fill(new_slots, self.upload)

    def _set_blocks(self, step: StepInput) -> None:
        tables = self.state.block_tables
        _, num_slots, num_columns = tables.shape
        rows = unpack_ids(step.block_groups).astype(np.int64) * num_slots + unpack_ids(step.block_slots)
        places, blocks = self.upload(rows * num_columns + unpack_ids(step.block_columns), unpack_ids(step.block_ids))
        tables.view(-1)[places.long()] = blocks

    def _set_segments(self, step: StepInput) -> None:
        entries, numbers = self.segments.segments, self.segments.slot_segments
        groups, segments, *fields = unpack_ids(step.segments).reshape(-1, 2 + SEGMENT_FIELDS).T
        slot_groups, slots, slot_numbers = unpack_ids(step.slot_segments).reshape(-1, 3).T
        places, values, slot_places, slot_values = self.upload(
            groups * entries.shape[1] + segments,
            np.stack(fields, axis=1).ravel(),
            slot_groups * numbers.shape[1] + slots,
            slot_numbers,
        )
        entries.view(-1, SEGMENT_FIELDS)[places.long()] = values.view(-1, SEGMENT_FIELDS)
        numbers.view(-1)[slot_places.long()] = slot_values
