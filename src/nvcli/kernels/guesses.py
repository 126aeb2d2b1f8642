"""Guesses: the tokens that a head or a small model drafts, and where its passes compute.

At the end of a step the head computes the step's positions, from the tokens that follow them; the last position that
counts of each row gives a first guess, which is kept with the head's state. At the start of a step with drafts, passes
of one token a row go on from there, and their guesses become the row's drafts. Everything is tensor operations that a
CUDA graph can hold.

Shapes: R rows and T tokens, padding included; S slots; G KV groups; H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvcli.kernels.drafts import HEAD
from nvcli.kernels.step_tensors import DraftRows, SlotState, StepInputs, StepRows


@dataclass(frozen=True, slots=True)
class KeptGuesses:
    """Tables of what is kept of each slot from one step to the next. The last row is the padding slot's."""

    tokens: Tensor
    """[S] int32, a guess at the token behind the last one."""
    positions: Tensor
    """[S] int32, its position; 0: there is none."""
    states: Tensor
    """[S, H], the head's state for the pass that follows."""

    @classmethod
    def empty(cls, num_slots: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> KeptGuesses:
        """Make tables without guesses."""
        return cls(
            torch.zeros(num_slots, dtype=torch.int32, device=device),
            torch.zeros(num_slots, dtype=torch.int32, device=device),
            torch.zeros(num_slots, hidden_size, dtype=dtype, device=device),
        )


def following_tokens(rows: StepRows, state: SlotState, positions: Tensor) -> Tensor:
    """Return the token that follows each of a step's positions [T], as far as it is known: [T] int32."""
    ends = rows.query_start_loc[1:]
    tokens = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    slots = rows.slots.index_select(0, torch.searchsorted(ends, tokens, right=True).clamp_(max=len(rows.slots) - 1))
    columns = (positions + 1).clamp_(max=state.token_ids.shape[1] - 1)
    return state.token_ids[slots.long(), columns.long()]


def last_tokens(rows: StepRows, state: SlotState, inputs: StepInputs, num_rows: int) -> tuple[Tensor, Tensor]:
    """Return where the last token that counts of each row is in the step, [R] int64, and the row's slot, [R] int64, or
    the padding slot for a row of which no token counts. `state.lengths` must be those behind the step."""
    slots, num_tokens = rows.slots[:num_rows].long(), rows.num_tokens[:num_rows]
    counted = state.lengths[slots] - inputs.seq_lens[:num_rows] + num_tokens
    last = rows.query_start_loc[:num_rows] + counted.clamp(min=1) - 1
    last = last.clamp_(max=inputs.input_ids.shape[0] - 1).long()
    return last, slots.masked_fill((counted < 1) | (num_tokens < 1), state.padding_slot)


def keep_guesses(kept: KeptGuesses, state: SlotState, slots: Tensor, guesses: Tensor, states: Tensor) -> None:
    """Keep guesses [R] int32 at the tokens behind the slots' last ones, with states [R, H]."""
    kept.tokens[slots] = guesses
    kept.positions[slots] = state.lengths[slots] + 1
    kept.states[slots] = states


@dataclass(frozen=True, slots=True)
class Passes:
    """The decode rows of a step before their drafts are made. All tensors are [R]."""

    slots: Tensor
    """int64."""
    last: Tensor
    """int32, the position of each row's last token."""
    end: Tensor
    """int32, the last position for which the row has a place in the KV cache."""
    most: Tensor
    """int32, the number of drafts that the row gets; 0 where it has no guess."""

    @classmethod
    def begin(
        cls, kept: KeptGuesses, rows: StepRows, state: SlotState, drafts: DraftRows, num_rows: int, *, for_all: bool
    ) -> Passes:
        """Find the rows that have a guess, and give them their number of drafts, whatever drafts they had before.
        `for_all`: old guesses serve too."""
        slots = rows.slots[:num_rows].long()
        last, most = state.lengths[slots], drafts.most[:num_rows]
        end = (last + rows.num_tokens[:num_rows] - 1).clamp_(min=0)
        if not for_all:
            most = torch.where(kept.positions[slots] == last + 1, most, 0)
        has_guess = most > 0
        drafts.num_drafts[:num_rows] = torch.where(has_guess, most, drafts.num_drafts[:num_rows])
        drafts.sources[:num_rows] = torch.where(has_guess, HEAD, drafts.sources[:num_rows])
        return cls(slots, last, end, most)

    def states(self, kept: KeptGuesses) -> Tensor:
        """Return the kept states of the rows [R, H], zeros where there is no guess."""
        return kept.states[self.slots].masked_fill_((self.most < 1)[:, None], 0)

    def write(self, state: SlotState, number: int, guesses: Tensor) -> Tensor:
        """Write draft `number`, from 1, of the rows that have as many, and return what now stands there: [R] int32."""
        columns = (self.last + number).clamp_(max=state.token_ids.shape[1] - 1).long()
        tokens = torch.where(self.most >= number, guesses, state.token_ids[self.slots, columns])
        state.token_ids[self.slots, columns] = tokens
        return tokens

    def places(self, state: SlotState, number: int) -> tuple[Tensor, Tensor]:
        """Return where pass `number`, from 1, computes: its positions [R] int32, and their places in the KV cache [G,
        R] int64. The step itself overwrites them all."""
        positions = torch.minimum(self.last + number - 1, self.end)
        columns, size = positions.long(), state.block_size
        blocks = state.block_tables[:, self.slots, columns // size].long()
        return positions, blocks * size + columns % size
