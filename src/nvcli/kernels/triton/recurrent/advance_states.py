"""Advances the states of rows with drafts, in Triton: two kernels for all layers of a KV group, one for their
recurrent states and one for those of their convolutions.

A row may read its state from a block and write its new state to the same block: each program reads all that it needs
before it writes its part of the state, which no other program reads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.kept_inputs import KeptInputs
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
def _advance_kernel(
    keys_ptr,  # [L, T, KEY_HEADS, KEY_DIM]
    written_ptr,  # [L, T, VALUE_HEADS, VALUE_DIM] float32
    decay_ptr,  # [L, T, VALUE_HEADS] float32
    pool_ptr,  # [L, num_blocks, VALUE_HEADS, KEY_DIM, VALUE_DIM] float32, read and written
    rows,  # `RowTensors`
    counts_ptr,  # [R] int32
    num_tokens,
    layer_stride,
    pool_stride,
    BLOCK_SIZE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    UNIT_KEYS: tl.constexpr,
):
    """Program (tile of a state's columns and value head, row, layer)."""
    TILES: tl.constexpr = (VALUE_DIM + VALUE_TILE - 1) // VALUE_TILE
    head = tl.program_id(0) // TILES
    layer = tl.program_id(2).to(tl.int64)
    start, count, source, target = _blocks_of(tl.program_id(1), rows, counts_ptr, BLOCK_SIZE)
    if target > 0:
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        i = tl.arange(0, KEY_TILE)
        j = tl.program_id(0) % TILES * VALUE_TILE + tl.arange(0, VALUE_TILE)
        in_key, in_value = i < KEY_DIM, j < VALUE_DIM
        inside = in_key[:, None] & in_value[None, :]
        places = layer * layer_stride + head * KEY_DIM * VALUE_DIM + i[:, None] * VALUE_DIM + j[None, :]
        state = tl.load(pool_ptr + places + source * pool_stride, mask=inside & (source > 0), other=0.0)
        for index in range(count):
            at = layer * num_tokens + start + index
            k = tl.load(keys_ptr + (at * KEY_HEADS + key_head) * KEY_DIM + i, mask=in_key, other=0.0).to(tl.float32)
            if UNIT_KEYS:
                k *= tl.rsqrt(tl.sum(k * k, 0) + NORM_EPS)
            written = tl.load(written_ptr + (at * VALUE_HEADS + head) * VALUE_DIM + j, mask=in_value, other=0.0)
            state *= tl.exp(tl.load(decay_ptr + at * VALUE_HEADS + head))
            state += k[:, None] * written[None, :]
        tl.store(pool_ptr + places + target * pool_stride, state, mask=inside)


@triton.jit
def _advance_inputs_kernel(
    inputs_ptr,  # [L, T, NUM_CHANNELS]
    pool_ptr,  # [L, num_blocks, TAPS - 1, NUM_CHANNELS], read and written
    rows,
    counts_ptr,
    num_tokens,
    layer_stride,
    pool_stride,
    NUM_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TAPS_TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Program (tile of channels, row, layer). TAPS_TILE is the next power of two of TAPS - 1."""
    layer = tl.program_id(2).to(tl.int64)
    start, count, source, target = _blocks_of(tl.program_id(1), rows, counts_ptr, BLOCK_SIZE)
    if target > 0:
        tap = tl.arange(0, TAPS_TILE)[:, None]
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


def advance_states(
    kept: KeptInputs,
    conv_pool: Tensor,
    pool: Tensor,
    rows: StateRows,
    counts: Tensor,
    *,
    has_unit_keys: bool = True,
) -> None:
    """See `nvcli.kernels.advance_states.advance_states`."""
    num_layers, _, num_heads, key_dim, value_dim = pool.shape
    num_inputs, num_channels = conv_pool.shape[2:]
    num_tokens, num_rows = kept.inputs.shape[1], rows.num_draft_rows
    assert all(tensor.is_contiguous() for tensor in kept)
    assert pool[0, 0].is_contiguous()
    assert conv_pool[0, 0].is_contiguous()
    tensors = RowTensors.of(rows)
    if pool.numel():
        tile = min(_TILE, next_power_of_2(value_dim))
        _advance_kernel[num_heads * ceil_div(value_dim, tile), num_rows, num_layers](
            kept.keys,
            kept.written,
            kept.decay,
            pool,
            tensors,
            counts,
            num_tokens,
            pool.stride(0),
            pool.stride(1),
            BLOCK_SIZE=rows.block_size,
            KEY_HEADS=kept.keys.shape[2] // key_dim,
            VALUE_HEADS=num_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEY_TILE=next_power_of_2(key_dim),
            VALUE_TILE=tile,
            UNIT_KEYS=has_unit_keys,
            num_warps=_WARPS,
        )
    channels = min(_CHANNELS, next_power_of_2(num_channels))
    _advance_inputs_kernel[ceil_div(num_channels, channels), num_rows, num_layers](
        kept.inputs,
        conv_pool,
        tensors,
        counts,
        num_tokens,
        conv_pool.stride(0),
        conv_pool.stride(1),
        NUM_CHANNELS=num_channels,
        TAPS=num_inputs + 1,
        BLOCK_SIZE=rows.block_size,
        TAPS_TILE=next_power_of_2(num_inputs),
        CHANNELS=channels,
    )
