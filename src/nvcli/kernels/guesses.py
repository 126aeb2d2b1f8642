"""Guesses: the tokens that a head or a small model drafts, and where its passes compute.

At the end of a step the head computes the step's positions, from the tokens that follow them; the last position that
counts of each row gives a first guess, which is kept with the head's state. At the start of a step with drafts, passes
of one token a row go on from there, and their guesses become the row's drafts.

Plain torch is the reference; CUDA tensors take the Triton kernels, which are tested against it: a launch each, which a
CUDA graph can hold, where a pass would otherwise make twenty.

Shapes: R rows and T tokens, padding included; S slots; G KV groups; H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.drafts import HEAD, LONGEST_MATCH
from nvcli.kernels.step_tensors import DraftRows, KeptGuesses, LastTokens, Pass, PassRows, SlotState, StepRows


def empty_guesses(num_slots: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> KeptGuesses:
    """Make tables without guesses."""
    return KeptGuesses(
        torch.zeros(num_slots, dtype=torch.int32, device=device),
        torch.zeros(num_slots, dtype=torch.int32, device=device),
        torch.zeros(num_slots, hidden_size, dtype=dtype, device=device),
        torch.zeros(num_slots, dtype=torch.float32, device=device),
    )


@with_kernel("elementwise.guesses")
def following_tokens(rows: StepRows, state: SlotState, positions: Tensor) -> Tensor:
    """Return the token that follows each of a step's positions [T], as far as it is known: [T] int32."""
    ends = rows.query_start_loc[1:]
    tokens = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    slots = rows.slots.index_select(0, torch.searchsorted(ends, tokens, right=True).clamp_(max=len(rows.slots) - 1))
    columns = (positions + 1).clamp_(max=state.token_ids.shape[1] - 1)
    return state.token_ids[slots.long(), columns.long()]


@with_kernel("elementwise.guesses")
def last_tokens(rows: StepRows, state: SlotState, seq_lens: Tensor, num_rows: int, num_tokens: int) -> LastTokens:
    """Find the last tokens of a step of `num_rows` rows and `num_tokens` tokens. seq_lens: [R] int32, the rows' lengths
    with all tokens of the step; `state.lengths` must be those with the tokens that count."""
    slots, computed = rows.slots[:num_rows].long(), rows.num_tokens[:num_rows]
    counted = state.lengths[slots] - seq_lens[:num_rows] + computed
    places = (rows.query_start_loc[:num_rows] + counted.clamp(min=1) - 1).clamp_(max=num_tokens - 1).long()
    slots = slots.masked_fill((counted < 1) | (computed < 1), state.padding_slot)
    return LastTokens(places, slots, state.lengths[slots] + 1)


@with_kernel("elementwise.guesses")
def keep_guesses(
    kept: KeptGuesses, last: LastTokens, guesses: Tensor | None, states: Tensor | None, odds: Tensor | None = None
) -> None:
    """Keep guesses [R] int32 for the slots of a step, with states [R, H]; None: only that the slots' keys are there.
    odds: [R] float32, the guesses' probabilities; None: nothing asks for them."""
    if odds is not None:
        kept.odds[last.slots] = odds
    kept.positions[last.slots] = last.following
    if guesses is not None and states is not None:
        kept.tokens[last.slots] = guesses.clamp(min=0)
        kept.states[last.slots] = states


@with_kernel("elementwise.guesses")
def begin_passes(
    kept: KeptGuesses, rows: StepRows, state: SlotState, drafts: DraftRows, num_rows: int, *, for_all: bool
) -> PassRows:
    """Find the rows that have a guess, and give them their number of drafts instead of those that were looked up,
    unless these follow a long match. `for_all`: old guesses serve too, for all rows."""
    slots = rows.slots[:num_rows].long()
    last, most = state.lengths[slots], drafts.most[:num_rows]
    end = last + most
    if not for_all:
        is_guessed = (kept.positions[slots] == last + 1) & (drafts.matches[:num_rows] < LONGEST_MATCH)
        most = torch.where(is_guessed, most, 0)
    has_guess = most > 0
    drafts.num_drafts[:num_rows] = torch.where(has_guess, most, drafts.num_drafts[:num_rows])
    drafts.sources[:num_rows] = torch.where(has_guess, HEAD, drafts.sources[:num_rows])
    return PassRows(slots, last, end, most)


@with_kernel("elementwise.guesses")
def next_pass(
    rows: PassRows, state: SlotState, number: int, guesses: Tensor | None, *, ahead: int, max_positions: int
) -> Pass:
    """Write `guesses` [R] int32, the latest, as drafts, and return pass `number`, from 1.

    ahead: 1 if a pass takes the token after its position, as heads do, else 0, and the first pass has no guesses
    before it. max_positions: the positions that the drafter knows.
    """
    if guesses is not None:
        tokens = write_drafts(rows, state, number - 1 + ahead, guesses)
    else:
        tokens = state.token_ids[rows.slots, rows.last.long()]
    positions = torch.minimum(rows.last + number - 1, rows.end)
    columns, size = positions.long(), state.block_size
    blocks = state.block_tables[:, rows.slots, columns // size].long()
    places = blocks * size + columns % size
    sampled = rows.last + number + ahead
    return Pass(tokens, positions.clamp(max=max_positions - 1), positions + 1, places, sampled)


def write_drafts(rows: PassRows, state: SlotState, number: int, guesses: Tensor) -> Tensor:
    """Write draft `number`, from 1, of the rows that have as many, and return what now stands there: [R] int32."""
    if rows.slots.is_cuda:  # one launch
        return next_pass(rows, state, number + 1, guesses, ahead=0, max_positions=1).tokens
    columns = (rows.last + number).clamp_(max=state.token_ids.shape[1] - 1).long()
    tokens = torch.where(rows.most >= number, guesses.clamp(min=0), state.token_ids[rows.slots, columns])
    state.token_ids[rows.slots, columns] = tokens
    return tokens


@with_kernel("elementwise.guesses")
def share_drafts(rows: StepRows, state: SlotState, drafts: DraftRows, odds: Tensor, *, is_sure: float = 0.9) -> None:
    """Give the tokens of a step's R decode rows, all of its rows, to the drafts that are likeliest to be right.

    Every row keeps its last token, and may have up to `drafts.most` drafts, or those that it has room for; as many are
    kept as `rows.num_tokens` has room for in all. `rows` and `drafts.num_drafts` are changed accordingly. odds: [K, R]
    float32, the probability of the first K drafts of each row, each with those before it; drafts that were looked up
    are taken to be right `is_sure` times as often as those before them.
    """
    num_places, num_rows = odds.shape
    is_row = rows.slots[:num_rows] != state.padding_slot
    has_room = (rows.num_tokens[:num_rows] - 1).masked_fill(~is_row, 0)
    most = torch.maximum(drafts.most[:num_rows].masked_fill(~is_row, 0), has_room)
    num_left = int(has_room.sum())
    place = torch.arange(num_places)[:, None]
    looked_up = is_sure ** (place + 1.0)
    values = torch.where(drafts.sources[:num_rows] == HEAD, odds, looked_up)
    values = values.masked_fill((place >= drafts.num_drafts[:num_rows]) | values.isnan(), 0)
    values = values.masked_fill(place >= most, -1).flatten()
    best = torch.argsort(values, descending=True, stable=True)[:num_left]
    kept = torch.zeros_like(values, dtype=torch.bool)
    kept[best[values[best] >= 0]] = True
    widths = 1 + kept.view(num_places, num_rows).sum(0).int()
    rows.num_tokens[:num_rows] = torch.where(is_row, widths, rows.num_tokens[:num_rows])
    rows.num_logits[:num_rows] = torch.where(is_row, widths, rows.num_logits[:num_rows])
    drafts.num_drafts[:num_rows] = torch.minimum(drafts.num_drafts[:num_rows], rows.num_tokens[:num_rows] - 1)
    rows.query_start_loc[1 : num_rows + 1] = rows.num_tokens[:num_rows].cumsum(0)
    rows.logits_start_loc[1 : num_rows + 1] = rows.num_logits[:num_rows].cumsum(0)
