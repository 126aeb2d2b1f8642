"""Makes the model's inputs from a step's rows: ids, positions, places in the KV cache, lengths, rows that need logits.

Plain torch is the reference; CUDA tensors take the Triton kernel that is held to it: one launch at the head of a step,
which a CUDA graph can hold. Only this operation advances the lengths of requests.

Shapes: R rows and T tokens, padding included; N rows of hidden states that need logits; G KV groups; S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.step_tensors import SlotState, StepInputs, StepRows


@with_kernel("elementwise.prepare_inputs")
def prepare_inputs(rows: StepRows, state: SlotState, out: StepInputs) -> None:
    """Fill `out` for the next tokens of each row's request, and add their number to `state.lengths`.

    No slot but the padding slot may be in two rows.
    """
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


@with_kernel("elementwise.prepare_inputs")
def keep_tokens(token_ids: Tensor, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
    """Put one sampled id for each of N rows into the table, where the next step finds its input.

    token_ids: [S, max_model_len] int32, written; slots: [N] int64; positions: [N] int32; ids: [N] int32. Every entry of
    the table stays a token of the vocabulary: `NOT_FINITE` and what is sampled for the padding slot become token 0.
    """
    is_padding = slots == len(token_ids) - 1
    token_ids[slots, positions.long()] = ids.masked_fill(is_padding, 0).clamp_(min=0)


@with_kernel("elementwise.prepare_inputs")
def write_tokens(token_ids: Tensor, slots: Tensor, starts: Tensor, offsets: Tensor, ids: Tensor) -> None:
    """Write spans of tokens into the table. Span i is ids[offsets[i] : offsets[i + 1]]; it begins at position starts[i]
    of slot slots[i].

    token_ids: [S, max_model_len] int32, written; slots, starts: [n] int32; offsets: [n + 1] int32; ids: int32.
    """
    ends = offsets.tolist()
    for slot, start, first, end in zip(slots.tolist(), starts.tolist(), ends, ends[1:], strict=False):
        token_ids[slot, start : start + end - first] = ids[first:end]
