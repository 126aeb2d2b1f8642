"""The tensors that `prepare_inputs` reads and fills: a step's rows, the slots' state and the inputs of the model.

Shapes: R rows and T tokens, padding included; N rows of hidden states that need logits; G KV groups; S slots.
"""

from __future__ import annotations

from dataclasses import dataclass

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
