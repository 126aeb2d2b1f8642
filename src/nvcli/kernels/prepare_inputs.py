"""From a step's rows to what the model reads: ids, positions, places in the KV cache, lengths, rows that need logits.

Plain torch is the reference; CUDA tensors take the Triton kernel that is held to it: one launch at the head of a step,
which a CUDA graph can hold. Only this operation advances the lengths of requests.

Shapes: R rows and T tokens, padding included; N rows of hidden states that need logits; G KV groups; S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """What to compute, row by row. One more row than the batch has stands last: the padding slot computes its tokens,
    which fill the batch up. All int32; a row of the padding slot is padding."""

    slots: Tensor
    """[R + 1]."""
    num_tokens: Tensor
    """[R + 1], tokens that each row computes."""
    num_logits: Tensor
    """[R + 1], how many of its last tokens need logits."""
    query_start_loc: Tensor
    """[R + 2], first token of each row; the last entry is T."""
    logits_start_loc: Tensor
    """[R + 2], first of the N rows that are kept for each row's logits, as many as it has or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """Tables with a row for each slot, the padding slot's last."""

    lengths: Tensor
    """[S] int32, tokens whose keys and values are in the cache: the position of the next token to compute."""
    token_ids: Tensor
    """[S, max_model_len] int32, each request's tokens by position."""
    block_tables: Tensor
    """[G, S, max_blocks] int32."""
    block_size: int

    @property
    def padding_slot(self) -> int:
        return len(self.lengths) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Buffers that are filled: the fields of `ForwardBatch`, and what to sample. They may be larger than needed."""

    input_ids: Tensor
    """[T] int32."""
    positions: Tensor
    """[T] int32; 0 for padding."""
    slot_mapping: Tensor
    """[G, T] int64; into the null block for padding."""
    slots: Tensor
    """[R + 1] int64."""
    seq_lens: Tensor
    """[R + 1] int32, lengths behind this step; of padding the row's own tokens."""
    logits_rows: Tensor
    """[N] int64: which of the T tokens; 0 where a row has fewer logits than are kept for it."""
    sample_slots: Tensor
    """[N] int64: whose next token it is; the padding slot where nobody's."""
    sample_positions: Tensor
    """[N] int32: its position."""


def prepare_inputs(rows: StepRows, state: SlotState, out: StepInputs) -> None:
    """Fill `out` for the next tokens of each row's request, and count them as computed in `state.lengths`.

    No slot but the padding slot is in two rows.
    """
    if rows.slots.is_cuda:
        from nvcli.kernels.triton import prepare_inputs as kernels

        kernels.prepare_inputs(rows, state, out)
        return
    slots, num_tokens = rows.slots.long(), rows.num_tokens.long()
    starts = rows.query_start_loc.long()
    is_padding = slots == state.padding_slot
    first_positions = torch.where(is_padding, 0, state.lengths[slots].long())
    row = torch.repeat_interleave(torch.arange(len(slots)), num_tokens)
    num_all = len(row)
    positions = torch.where(is_padding[row], 0, first_positions[row] + torch.arange(num_all) - starts[row])
    blocks = state.block_tables[:, slots[row], positions // state.block_size].long()
    out.input_ids[:num_all] = state.token_ids[slots[row], positions]
    out.positions[:num_all] = positions
    out.slot_mapping[:, :num_all] = blocks * state.block_size + positions % state.block_size
    out.slots[: len(slots)] = slots
    out.seq_lens[: len(slots)] = first_positions + num_tokens

    kept = rows.logits_start_loc.long()
    row = torch.repeat_interleave(torch.arange(len(slots)), kept.diff())
    index = torch.arange(len(row)) - kept[row]
    num_logits = rows.num_logits.long()[row]
    is_used = index < num_logits
    behind = num_tokens[row] - num_logits + index
    out.logits_rows[: len(row)] = torch.where(is_used, starts[row] + behind, 0)
    out.sample_slots[: len(row)] = torch.where(is_used, slots[row], state.padding_slot)
    out.sample_positions[: len(row)] = torch.where(is_used, first_positions[row] + behind + 1, 0)

    state.lengths[slots[~is_padding]] += num_tokens[~is_padding].int()


def write_tokens(token_ids: Tensor, slots: Tensor, starts: Tensor, offsets: Tensor, ids: Tensor) -> None:
    """Put spans of tokens into the table: span i, ids[offsets[i] : offsets[i + 1]], from position starts[i] of slot
    slots[i] on.

    token_ids: [S, max_model_len] int32, written; slots, starts: [n] int32; offsets: [n + 1] int32; ids: int32.
    """
    if token_ids.is_cuda:
        from nvcli.kernels.triton import prepare_inputs as kernels

        kernels.write_tokens(token_ids, slots, starts, offsets, ids)
        return
    ends = offsets.tolist()
    for slot, start, first, end in zip(slots.tolist(), starts.tolist(), ends, ends[1:], strict=False):
        token_ids[slot, start : start + end - first] = ids[first:end]
