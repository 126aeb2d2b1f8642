"""Advances the states of rows with drafts, in Triton: a kernel for the states of convolutions of all layers of a KV
group, and one for the recurrent states of some rows, for which the kernel of a step with drafts (`steps.py`) shares its
way of adding the tokens that count.

A row may read its state from a block and write its new state to the same block: each program reads all that it needs
before it writes its part of the state, which no other program reads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.kept_inputs import KeptInputs, PendingTokens
from nvcli.kernels.recurrent_types import RecurrentHeads
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.recurrent.delta_chunks import NORM_EPS
from nvcli.kernels.triton.recurrent.state_rows import RowTensors, row_of
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_TILE, _WARPS = 64, 4
"""Measured on an H200 with 3 layers, 128 rows and 32 heads of 128, where one token of each row counts: 409 µs, with
states read and written at 3.9 TB/s."""
_CHANNELS = 1024


@triton.jit
def _blocks_of(row, rows, counts_ptr, BLOCK_SIZE: tl.constexpr):
    """Return a row's first token, how many of its tokens count, and the blocks of its present state and its next one;
    0: none."""
    start, _, before, source = row_of(row, rows, BLOCK_SIZE)
    count = tl.load(counts_ptr + row)
    slot = tl.load(rows.slots + row)
    column = tl.maximum(before + count - 1, 0) // BLOCK_SIZE
    target = tl.load(rows.tables + slot * rows.table_stride + column, mask=count > 0, other=0).to(tl.int64)
    return start, count, source, target


@triton.jit
def add_pending(
    state,
    first,
    count,
    head,
    i,
    j,
    rates,  # [i, j] float32, as in `KeptInputs`, where each value has a decay
    kept,  # `KeptInputs`
    HEADS: tl.constexpr,  # `RecurrentHeads`
):
    """Add `count` kept tokens, from number `first` (int64) on, to columns `j` of one head's state [i, j]."""
    KEY_HEADS: tl.constexpr = HEADS.num_key_heads
    VALUE_HEADS: tl.constexpr = HEADS.num_value_heads
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    for index in range(count):
        at = first + index
        k = tl.load(kept.keys + (at * KEY_HEADS + key_head) * KEY_DIM + i, mask=i < KEY_DIM, other=0.0).to(tl.float32)
        if HEADS.rule == "delta":
            k *= tl.rsqrt(tl.sum(k * k, 0) + NORM_EPS)
        written = tl.load(kept.written + (at * VALUE_HEADS + head) * VALUE_DIM + j, mask=j < VALUE_DIM, other=0.0)
        if HEADS.decays == "value":
            step_ptrs = kept.decay + (at * VALUE_HEADS + head) * VALUE_DIM + j
            state *= tl.exp(rates * tl.load(step_ptrs, mask=j < VALUE_DIM, other=0.0)[None, :])
        elif HEADS.decays == "key":
            decay_ptrs = kept.decay + (at * VALUE_HEADS + head) * KEY_DIM + i
            state *= tl.exp(tl.load(decay_ptrs, mask=i < KEY_DIM, other=0.0))[:, None]
        else:
            state *= tl.exp(tl.load(kept.decay + at * VALUE_HEADS + head))
        state += k[:, None] * written[None, :]
    return state


@triton.jit
def _advance_kernel(
    kept,  # `KeptInputs` of L layers
    pool_ptr,  # [L, num_blocks, VALUE_HEADS, KEY_DIM, VALUE_DIM] float32, read and written
    pending,  # `PendingTokens`
    chosen_ptr,  # [n] int32
    num_tokens,
    layer_stride,
    pool_stride,
    HEADS: tl.constexpr,  # `RecurrentHeads`
    VALUE_TILE: tl.constexpr,
):
    """Program (tile of a state's columns and value head, chosen row, layer)."""
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    TILES: tl.constexpr = (VALUE_DIM + VALUE_TILE - 1) // VALUE_TILE
    head = tl.program_id(0) // TILES
    layer = tl.program_id(2).to(tl.int64)
    row = tl.load(chosen_ptr + tl.program_id(1))
    target = tl.load(pending.targets + row)
    if target > 0:
        source = tl.load(pending.sources + row)
        first = layer * num_tokens + tl.load(pending.starts + row)
        i = tl.arange(0, triton.next_power_of_2(KEY_DIM))
        j = tl.program_id(0) % TILES * VALUE_TILE + tl.arange(0, VALUE_TILE)
        inside = (i < KEY_DIM)[:, None] & (j < VALUE_DIM)[None, :]
        places = layer * layer_stride + head * KEY_DIM * VALUE_DIM + i[:, None] * VALUE_DIM + j[None, :]
        state = tl.load(pool_ptr + places + source * pool_stride, mask=inside & (source > 0), other=0.0)
        count = tl.load(pending.counts + row)
        rates = 0.0
        if HEADS.decays == "value":
            of_layer = layer * KEY_DIM * VALUE_DIM + i[:, None] * VALUE_DIM + j[None, :]
            rates = tl.load(kept.rates + of_layer, mask=inside, other=0.0)
        state = add_pending(state, first, count, head, i, j, rates, kept, HEADS)
        tl.store(pool_ptr + places + target * pool_stride, state, mask=inside)


@triton.jit
def _end_drafts_kernel(
    inputs_ptr,  # [L, T, NUM_CHANNELS]
    pool_ptr,  # [L, num_blocks, TAPS - 1, NUM_CHANNELS], read and written
    rows,  # `RowTensors`
    counts_ptr,  # [R] int32
    pending,  # `PendingTokens`, written
    num_tokens,
    layer_stride,
    pool_stride,
    NUM_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Program (tile of channels, row, layer)."""
    row, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    start, count, source, target = _blocks_of(row, rows, counts_ptr, BLOCK_SIZE)
    if (tl.program_id(0) == 0) & (layer == 0):
        tl.store(pending.starts + row, tl.load(pending.turn) * num_tokens + start)
        tl.store(pending.counts + row, count)
        tl.store(pending.sources + row, source)
        tl.store(pending.targets + row, target)
    if target > 0:
        tap = tl.arange(0, triton.next_power_of_2(max(1, TAPS - 1)))[:, None]
        channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
        inside = (channel < NUM_CHANNELS) & (tap < TAPS - 1)
        place = tap + count  # the state's entries, then the row's tokens
        is_own = place >= TAPS - 1
        channels = layer * layer_stride + channel
        before = tl.load(
            pool_ptr + channels + source * pool_stride + place * NUM_CHANNELS,
            mask=inside & ~is_own & (source > 0),
            other=0.0,
        )
        at = layer * num_tokens + start + place - (TAPS - 1)
        own = tl.load(inputs_ptr + at * NUM_CHANNELS + channel, mask=inside & is_own, other=0.0).to(before.dtype)
        tl.debug_barrier()  # a row may write to the block that it read from, which has been read by now
        places = channels + target * pool_stride + tap * NUM_CHANNELS
        tl.store(pool_ptr + places, tl.where(is_own, own, before), mask=inside)


def end_drafts(kept: KeptInputs, conv_pool: Tensor, rows: StateRows, counts: Tensor) -> None:
    """See `nvcli.kernels.advance_states.end_drafts`."""
    assert rows.pending is not None
    assert kept.inputs.is_contiguous()
    assert conv_pool[0, 0].is_contiguous()
    num_layers, _, num_inputs, num_channels = conv_pool.shape
    width = max(1, num_channels)  # without a convolution, a program enters the tokens and has no channel
    channels = min(_CHANNELS, next_power_of_2(width))
    _end_drafts_kernel[ceil_div(width, channels), rows.num_draft_rows, num_layers](
        kept.inputs,
        conv_pool,
        RowTensors.of(rows),
        counts,
        rows.pending,
        kept.inputs.shape[1],
        conv_pool.stride(0),
        conv_pool.stride(1),
        NUM_CHANNELS=num_channels,
        TAPS=num_inputs + 1,
        BLOCK_SIZE=rows.block_size,
        CHANNELS=channels,
    )


def advance_states(
    kept: KeptInputs, pool: Tensor, pending: PendingTokens, chosen: Tensor, *, has_unit_keys: bool = True
) -> None:
    """See `nvcli.kernels.advance_states.advance_states`."""
    num_layers, _, num_heads, key_dim, value_dim = pool.shape
    if not pool.numel() or not len(chosen):
        return
    assert all(tensor.is_contiguous() for tensor in kept)
    assert pool[0, 0].is_contiguous()
    tile = min(_TILE, next_power_of_2(value_dim))
    heads = RecurrentHeads(
        num_key_heads=kept.keys.shape[2] // key_dim,
        key_dim=key_dim,
        num_value_heads=num_heads,
        value_dim=value_dim,
        rule="channel scan" if kept.rates.numel() else "delta" if has_unit_keys else "scan",
        decays_by_channel=kept.decay.shape[-1] > 1,
    )
    _advance_kernel[num_heads * ceil_div(value_dim, tile), len(chosen), num_layers](
        kept,
        pool,
        pending,
        chosen,
        kept.keys.shape[1],
        pool.stride(0),
        pool.stride(1),
        HEADS=heads,
        VALUE_TILE=tile,
        num_warps=_WARPS,
    )
