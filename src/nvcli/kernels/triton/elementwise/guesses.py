"""Guesses of a head and the rows of its passes, in Triton: see `nvcli.kernels.guesses`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.drafts import HEAD, LONGEST_MATCH
from nvcli.kernels.step_tensors import LastTokens, Pass, PassRows

if TYPE_CHECKING:
    from nvcli.kernels.step_tensors import DraftRows, KeptGuesses, SlotState, StepRows

_TOKENS, _FEW_TOKENS = 1024, 64
"""Tokens of a row that a program takes, in steps with many tokens and with few."""
_ROWS, _WARPS = tl.constexpr(128), 4
"""Rows that a program takes, one in each thread of its warps."""
_FEW_ROWS, _MANY_ROWS = 256, 1024
"""Rows of the programs that share drafts."""
_HIDDEN = tl.constexpr(1024)
"""Numbers of a state that a program copies at a time."""
_HEAD, _LONG_MATCH = tl.constexpr(HEAD), tl.constexpr(LONGEST_MATCH)


@triton.jit(do_not_specialize=["stride", "num_columns"])
def _following_tokens_kernel(
    rows,  # `StepRows`
    positions_ptr,  # [T] int32
    token_ids_ptr,  # [S, ...] int32, rows `stride` apart
    out_ptr,  # [T] int32, written
    stride,
    num_columns,
    TOKENS: tl.constexpr,
):
    """Program (row, TOKENS of its tokens)."""
    row = tl.program_id(0)
    first, end = tl.load(rows.query_start_loc + row), tl.load(rows.query_start_loc + row + 1)
    token = first + tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = token < end
    slot = tl.load(rows.slots + row).to(tl.int64)
    column = tl.minimum(tl.load(positions_ptr + token, mask=inside, other=0) + 1, num_columns - 1)
    tl.store(out_ptr + token, tl.load(token_ids_ptr + slot * stride + column, mask=inside, other=0), mask=inside)


def following_tokens(rows: StepRows, state: SlotState, positions: Tensor) -> Tensor:
    """See `nvcli.kernels.guesses.following_tokens`."""
    out = torch.empty_like(positions)
    tokens = _FEW_TOKENS if len(positions) <= _TOKENS else _TOKENS
    _following_tokens_kernel[(len(rows.slots), triton.cdiv(len(positions), tokens))](
        rows,
        positions,
        state.token_ids,
        out,
        state.token_ids.stride(0),
        state.token_ids.shape[1],
        TOKENS=tokens,
        num_warps=1 if tokens < _TOKENS else 4,
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "padding_slot"])
def _last_tokens_kernel(
    rows,  # `StepRows`
    lengths_ptr,  # [S] int32
    seq_lens_ptr,  # [R] int32
    last,  # `LastTokens`, written
    num_rows,
    num_tokens,
    padding_slot,
):
    """Program (_ROWS rows)."""
    row = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    inside = row < num_rows
    slot = tl.load(rows.slots + row, mask=inside, other=padding_slot).to(tl.int64)
    computed = tl.load(rows.num_tokens + row, mask=inside, other=0)
    start = tl.load(rows.query_start_loc + row, mask=inside, other=0)
    counted = tl.load(lengths_ptr + slot) - tl.load(seq_lens_ptr + row, mask=inside, other=0) + computed
    slot = tl.where((counted < 1) | (computed < 1), padding_slot, slot)
    place = tl.minimum(start + tl.maximum(counted, 1) - 1, num_tokens - 1)
    tl.store(last.places + row, place.to(tl.int64), mask=inside)
    tl.store(last.slots + row, slot, mask=inside)
    tl.store(last.following + row, tl.load(lengths_ptr + slot) + 1, mask=inside)


def last_tokens(rows: StepRows, state: SlotState, seq_lens: Tensor, num_rows: int, num_tokens: int) -> LastTokens:
    """See `nvcli.kernels.guesses.last_tokens`."""
    last = LastTokens(*_empty(num_rows, torch.int64, torch.int64, torch.int32, device=seq_lens.device))
    _last_tokens_kernel[(triton.cdiv(num_rows, _ROWS.value),)](
        rows, state.lengths, seq_lens, last, num_rows, num_tokens, state.padding_slot, num_warps=_WARPS
    )
    return last


def _empty(num_rows: int, *dtypes: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """Allocate a tensor [num_rows] of each type; kernels find them aligned alike."""
    return (torch.empty(num_rows, dtype=dtype, device=device) for dtype in dtypes)


@triton.jit(do_not_specialize=["hidden_size", "state_stride"])
def _keep_guesses_kernel(
    kept,  # `KeptGuesses`, written
    slots_ptr,  # [R] int64
    following_ptr,  # [R] int32
    guesses_ptr,  # [R] int32, with states
    states_ptr,  # None, or [R, hidden_size], rows `state_stride` apart
    hidden_size,
    state_stride,
):
    """Program (row). Rows of the padding slot write its row all at once."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    tl.store(kept.positions + slot, tl.load(following_ptr + row))
    if states_ptr is not None:
        tl.store(kept.tokens + slot, tl.maximum(tl.load(guesses_ptr + row), 0))
        for first in range(0, hidden_size, _HIDDEN):
            index = first + tl.arange(0, _HIDDEN)
            inside = index < hidden_size
            value = tl.load(states_ptr + row * state_stride + index, mask=inside)
            tl.store(kept.states + slot * hidden_size + index, value, mask=inside)


def keep_guesses(
    kept: KeptGuesses, last: LastTokens, guesses: Tensor | None, states: Tensor | None, odds: Tensor | None = None
) -> None:
    """See `nvcli.kernels.guesses.keep_guesses`."""
    if odds is not None:
        kept.odds[last.slots] = odds
    _keep_guesses_kernel[(len(last.slots),)](
        kept,
        last.slots,
        last.following,
        guesses,
        states,
        kept.states.shape[1],
        states.stride(0) if states is not None else 0,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _begin_passes_kernel(
    rows,  # `StepRows`
    drafts,  # `DraftRows`; num_drafts and sources are written
    lengths_ptr,  # [S] int32
    kept_positions_ptr,  # [S] int32
    passes,  # `PassRows`, written
    num_rows,
    FOR_ALL: tl.constexpr,
):
    """Program (_ROWS rows)."""
    row = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    inside = row < num_rows
    slot = tl.load(rows.slots + row, mask=inside, other=0).to(tl.int64)
    last = tl.load(lengths_ptr + slot)
    most = tl.load(drafts.most + row, mask=inside, other=0)
    if not FOR_ALL:
        is_long = tl.load(drafts.matches + row, mask=inside, other=0) >= _LONG_MATCH
        most = tl.where((tl.load(kept_positions_ptr + slot) == last + 1) & ~is_long, most, 0)
    tl.store(passes.slots + row, slot, mask=inside)
    tl.store(passes.last + row, last, mask=inside)
    tl.store(passes.end + row, last + tl.load(drafts.most + row, mask=inside, other=0), mask=inside)
    tl.store(passes.most + row, most, mask=inside)
    tl.store(drafts.num_drafts + row, most, mask=inside & (most > 0))
    tl.store(drafts.sources + row, tl.full((_ROWS,), _HEAD, tl.int32), mask=inside & (most > 0))


def begin_passes(
    kept: KeptGuesses, rows: StepRows, state: SlotState, drafts: DraftRows, num_rows: int, *, for_all: bool
) -> PassRows:
    """See `nvcli.kernels.guesses.begin_passes`."""
    passes = PassRows(*_empty(num_rows, torch.int64, *[torch.int32] * 3, device=drafts.most.device))
    _begin_passes_kernel[(triton.cdiv(num_rows, _ROWS.value),)](
        rows, drafts, state.lengths, kept.positions, passes, num_rows, FOR_ALL=for_all, num_warps=_WARPS
    )
    return passes


@triton.jit(
    do_not_specialize=[
        "number", "ahead", "max_positions", "num_rows", "num_columns", "token_ids_stride", "block_table_stride",
        "group_stride",
    ]
)  # fmt: skip
def _next_pass_kernel(
    passes,  # `PassRows`
    guesses_ptr,  # None, or [R] int32
    token_ids_ptr,  # [S, ...] int32, rows token_ids_stride apart, written
    block_tables_ptr,  # [G, S, ...] int32, rows block_table_stride apart, groups group_stride
    out,  # `Pass`, written
    number,
    ahead,
    max_positions,
    num_rows,
    num_columns,
    token_ids_stride,
    block_table_stride,
    group_stride,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (_ROWS rows)."""
    row = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    inside = row < num_rows
    slot = tl.load(passes.slots + row, mask=inside, other=0)
    last = tl.load(passes.last + row, mask=inside, other=0)
    draft = number - 1 + ahead
    place = token_ids_ptr + slot * token_ids_stride + tl.minimum(last + draft, num_columns - 1)
    token = tl.load(place, mask=inside, other=0)
    if guesses_ptr is not None:
        is_draft = tl.load(passes.most + row, mask=inside, other=0) >= draft
        guess = tl.maximum(tl.load(guesses_ptr + row, mask=inside, other=0), 0)
        token = tl.where(is_draft, guess, token)
        tl.store(place, token, mask=inside & is_draft)
    position = tl.minimum(last + number - 1, tl.load(passes.end + row, mask=inside, other=0))
    tl.store(out.tokens + row, token, mask=inside)
    tl.store(out.positions + row, tl.minimum(position, max_positions - 1), mask=inside)
    tl.store(out.seq_lens + row, position + 1, mask=inside)
    tl.store(out.sampled + row, last + number + ahead, mask=inside)
    column = block_tables_ptr + slot * block_table_stride + position // BLOCK_SIZE
    for group in tl.static_range(NUM_GROUPS):
        block = tl.load(column + group * group_stride, mask=inside, other=0).to(tl.int64)
        tl.store(out.places + group * num_rows + row, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)


def next_pass(
    rows: PassRows, state: SlotState, number: int, guesses: Tensor | None, *, ahead: int, max_positions: int
) -> Pass:
    """See `nvcli.kernels.guesses.next_pass`."""
    num_rows, num_groups, device = len(rows.slots), len(state.block_tables), rows.slots.device
    tokens, positions, seq_lens, sampled = _empty(num_rows, *[torch.int32] * 4, device=device)
    places = torch.empty(num_groups, num_rows, dtype=torch.int64, device=device)
    out = Pass(tokens, positions, seq_lens, places, sampled)
    _next_pass_kernel[(triton.cdiv(num_rows, _ROWS.value),)](
        rows,
        guesses,
        state.token_ids,
        state.block_tables,
        out,
        number,
        ahead,
        max_positions,
        num_rows,
        state.token_ids.shape[1],
        state.token_ids.stride(0),
        state.block_tables.stride(1),
        state.block_tables.stride(0),
        NUM_GROUPS=num_groups,
        BLOCK_SIZE=state.block_size,
        num_warps=_WARPS,
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "padding_slot"])
def _share_drafts_kernel(
    rows,  # `StepRows`, written
    drafts,  # `DraftRows`; num_drafts is written
    odds_ptr,  # [num_places, num_rows] float32
    num_places,
    num_rows,
    padding_slot,
    is_sure,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program. Odds are compared as integers, which have the same order."""
    row, place = tl.arange(0, ROWS), tl.arange(0, PLACES)[:, None]
    inside = row < num_rows
    is_row = inside & (tl.load(rows.slots + row, mask=inside, other=padding_slot) != padding_slot)
    num_tokens = tl.load(rows.num_tokens + row, mask=inside, other=0)
    num_logits = tl.load(rows.num_logits + row, mask=inside, other=0)
    num_drafts = tl.load(drafts.num_drafts + row, mask=inside, other=0)
    has_room = tl.where(is_row, num_tokens - 1, 0)
    most = tl.maximum(tl.load(drafts.most + row, mask=is_row, other=0), has_room)
    num_left = tl.sum(has_room, axis=0)
    cells = (place < num_places) & (place < most[None, :])
    odds = tl.load(odds_ptr + place * num_rows + row[None, :], mask=cells, other=0.0)
    is_found = tl.load(drafts.sources + row, mask=inside, other=0) != _HEAD
    odds = tl.where(is_found[None, :], tl.exp((place + 1) * tl.log(is_sure)), odds)
    odds = tl.where((place < num_drafts[None, :]) & (odds >= 0), odds, 0.0)  # not NaN
    keys = tl.where(cells, odds.to(tl.int32, bitcast=True), -1)
    least = num_left * 0  # the largest key that enough drafts reach
    for number in range(31):
        wanted = least | (1 << (30 - number))
        if tl.sum(tl.sum((keys >= wanted).to(tl.int32), axis=1), axis=0) >= num_left:
            least = wanted
    is_above = keys > least
    num_more = num_left - tl.sum(tl.sum(is_above.to(tl.int32), axis=1), axis=0)
    ties = (keys == least).to(tl.int32)
    of_place = tl.sum(ties, axis=1)
    before = tl.cumsum(of_place, axis=0) - of_place
    kept = is_above | ((ties == 1) & (tl.cumsum(ties, axis=1) + before[:, None] <= num_more))
    width = 1 + tl.sum(kept.to(tl.int32), axis=0)
    num_tokens = tl.where(is_row, width, num_tokens)
    num_logits = tl.where(is_row, width, num_logits)
    tl.store(rows.num_tokens + row, num_tokens, mask=inside)
    tl.store(rows.num_logits + row, num_logits, mask=inside)
    tl.store(drafts.num_drafts + row, tl.minimum(num_drafts, num_tokens - 1), mask=inside)
    tl.store(rows.query_start_loc + 1 + row, tl.cumsum(num_tokens, axis=0), mask=inside)
    tl.store(rows.logits_start_loc + 1 + row, tl.cumsum(num_logits, axis=0), mask=inside)


def share_drafts(rows: StepRows, state: SlotState, drafts: DraftRows, odds: Tensor, *, is_sure: float = 0.9) -> None:
    """See `nvcli.kernels.guesses.share_drafts`."""
    num_places, num_rows = odds.shape
    _share_drafts_kernel[(1,)](
        rows,
        drafts,
        odds,
        num_places,
        num_rows,
        state.padding_slot,
        is_sure,
        PLACES=triton.next_power_of_2(num_places),
        ROWS=max(_FEW_ROWS if num_rows <= _FEW_ROWS else _MANY_ROWS, triton.next_power_of_2(num_rows)),
        num_warps=4 if num_rows <= _FEW_ROWS else 8,
    )
