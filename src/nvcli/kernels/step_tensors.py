"""The tensors that `prepare_inputs` reads and fills: a step's rows, the slots' state and the inputs of the model.

Shapes: R rows and T tokens, padding included; N rows of hidden states that need logits; G KV groups; S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

RUN = 3
"""Length of the runs of tokens whose successors an `AnswerTable` knows."""
TOKEN_BITS = 20
"""Bits of a token id in an entry of the table. Larger ids are cut off, which makes wrong drafts and does no other
harm."""
CHECK_BITS = 12
"""Bits of the hash that an entry keeps. They are not among those that select the entry: a table has at most
2 ** 20 entries."""


class StepRows(NamedTuple):
    """The rows of a step. All tensors are int32, and every row of the padding slot is padding.

    The last row is one more than the batch has. It belongs to the padding slot, and its tokens fill the batch up.
    """

    slots: Tensor
    """[R + 1], the slot of each row."""
    num_tokens: Tensor
    """[R + 1], tokens that each row computes."""
    num_logits: Tensor
    """[R + 1], the number of each row's last tokens that need logits."""
    query_start_loc: Tensor
    """[R + 2], the first token of each row; the last entry is T."""
    logits_start_loc: Tensor
    """[R + 2], the first of the N logits rows that are kept for each row: as many as it has logits, or more."""


class DraftRows(NamedTuple):
    """The drafts of a step's rows, for steps in which decode rows have some. All tensors are [R + 1] int32."""

    limits: Tensor
    """Maximum tokens of each row's request that may be computed when the step is over."""
    most: Tensor
    """Maximum drafts of each row; 0 for rows that have none."""
    num_drafts: Tensor
    """The number of each row's drafts, as `find_drafts` fills it in."""
    sources: Tensor
    """The source of each row's drafts, as an index of `DRAFT_SOURCES`, as `find_drafts` fills it in."""
    matches: Tensor
    """The number of a row's last tokens that came up before in its text, as `find_drafts` fills it in."""
    counts: Tensor
    """The number of tokens that each row gives, as `accept_drafts` fills it in."""


class AnswerTable(NamedTuple):
    """A hash table of the tokens that followed each run of tokens in answers, in whichever slot
    (`nvcli.kernels.answer_table`)."""

    entries: Tensor
    """[a power of two] int64; 0: nothing is known."""
    ends: Tensor
    """[S] int32, the position of the first token of each slot that is not entered yet."""
    time: Tensor
    """[1] int64, at least 1. Later entries replace earlier ones."""


class KeptGuesses(NamedTuple):
    """Tables of what is kept of each slot from one step to the next. The last row is the padding slot's."""

    tokens: Tensor
    """[S] int32, a guess at the token after the last one."""
    positions: Tensor
    """[S] int32, its position; 0: there is none."""
    states: Tensor
    """[S, H], the head's state for the pass that follows."""
    odds: Tensor
    """[S] float32, the probability that the head gave to the guess."""


class LastTokens(NamedTuple):
    """The last token that counts of each row of a step. All tensors are [R]."""

    places: Tensor
    """int64, where it is among the step's tokens."""
    slots: Tensor
    """int64, the row's slot, or the padding slot for a row of which no token counts."""
    following: Tensor
    """int32, the position of the token after the next one, which a head guesses."""


class PassRows(NamedTuple):
    """The decode rows of a step before their drafts are made. All tensors are [R]."""

    slots: Tensor
    """int64."""
    last: Tensor
    """int32, the position of each row's last token."""
    end: Tensor
    """int32, the last position of a draft."""
    most: Tensor
    """int32, the number of drafts that the row gets; 0 where it has no guess."""


class Pass(NamedTuple):
    """A pass of one token a row: what it takes, and where it computes. All tensors but `places` are [R] int32."""

    tokens: Tensor
    positions: Tensor
    seq_lens: Tensor
    """The rows' lengths with the pass."""
    places: Tensor
    """[G, R] int64, in the KV cache. The step itself overwrites them all."""
    sampled: Tensor
    """The positions of the tokens that the pass guesses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """The tables with a row for each slot. The last row is the padding slot's."""

    lengths: Tensor
    """[S] int32, the number of tokens whose keys and values are in the cache: the position of the next token to
    compute."""
    token_ids: Tensor
    """[S, max_model_len] int32, each request's tokens by position."""
    block_tables: Tensor
    """[G, S, max_blocks] int32, each slot's block ids by KV group."""
    block_size: int

    @property
    def padding_slot(self) -> int:
        return len(self.lengths) - 1


class StepInputs(NamedTuple):
    """The buffers that are filled: fields of `ForwardBatch`, and what to sample. They may be larger than a step
    needs."""

    input_ids: Tensor
    """[T] int32, the id of each token."""
    positions: Tensor
    """[T] int32, the position of each token; 0 for padding."""
    slot_mapping: Tensor
    """[G, T] int64, the place of each token in the KV cache; in the null block for padding, and undefined in groups in
    which tokens share keys."""
    slots: Tensor
    """[R + 1] int64, the slot of each row."""
    seq_lens: Tensor
    """[R + 1] int32, the length of each row's request after this step; for padding, the number of the row's tokens."""
    logits_rows: Tensor
    """[N] int64, the token that each logits row belongs to; 0 for one that is kept and not used."""
    sample_slots: Tensor
    """[N] int64, the slot whose next token each logits row gives; the padding slot for one that is not used."""
    sample_positions: Tensor
    """[N] int32, the position of that next token."""
