"""The short causal convolution in Triton, in three kernels: rows of one token, which move their state on by themselves;
the tokens of all chunks side by side, which read the states; and, behind them, the states that the chunks leave.

A block may be both the state that a row goes on from and the one that it leaves. So no program of a launch reads what
another one writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.state_rows import row_arguments, row_of
from nvcli.kernels.whole_numbers import ceil_div

_STEP_CHANNELS = 128
_TOKENS, _CHANNELS = 16, 256


@triton.jit
def _step_kernel(
    x_ptr,  # [T, NUM_CHANNELS], rows x_stride apart
    weight_ptr,  # [NUM_CHANNELS, TAPS]
    pool_ptr,  # [num_blocks, TAPS - 1, NUM_CHANNELS], blocks pool_stride apart, read and written
    out_ptr,  # [T, NUM_CHANNELS], written
    slots_ptr,  # [R] int64
    seq_lens_ptr,  # [R] int32
    starts_ptr,  # [R + 1] int32
    places_ptr,  # [T] int64
    tables_ptr,  # [slots, max_blocks] int32, rows table_stride apart
    table_stride,
    x_stride,
    pool_stride,
    NUM_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Program (row, tile of channels), for a row of one token."""
    token, _, _, source = row_of(
        tl.program_id(0), slots_ptr, seq_lens_ptr, starts_ptr, tables_ptr, table_stride, BLOCK_SIZE
    )
    target = tl.load(places_ptr + token) // BLOCK_SIZE
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < NUM_CHANNELS
    own = tl.load(x_ptr + token.to(tl.int64) * x_stride + channel, mask=inside, other=0.0)
    weight_ptr += channel * TAPS
    total = own.to(tl.float32) * tl.load(weight_ptr + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    history_ptr = pool_ptr + source * pool_stride + channel
    target_ptr = pool_ptr + target * pool_stride + channel
    # Input i becomes entry i - 1 of the next state, which is read before: so a block may be its own source.
    for tap in tl.static_range(TAPS - 1):
        value = tl.load(history_ptr + tap * NUM_CHANNELS, mask=inside & (source > 0), other=0.0)
        total += value.to(tl.float32) * tl.load(weight_ptr + tap, mask=inside, other=0.0).to(tl.float32)
        if tap > 0:
            tl.debug_barrier()
            tl.store(target_ptr + (tap - 1) * NUM_CHANNELS, value, mask=inside & (target > 0))
    tl.debug_barrier()
    tl.store(target_ptr + (TAPS - 2) * NUM_CHANNELS, own.to(pool_ptr.dtype.element_ty), mask=inside & (target > 0))
    out = total * tl.sigmoid(total)
    out_ptr += token.to(tl.int64) * NUM_CHANNELS + channel
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _row_of_token(token, starts_ptr, first_row, num_rows, num_halvings):
    """Return the last row that begins at a token or before it, of rows `first_row` to `num_rows`, for each token."""
    low = tl.zeros_like(token) + first_row
    high = tl.zeros_like(token) + num_rows
    for _ in range(num_halvings):
        middle = (low + high) // 2
        begins = tl.load(starts_ptr + middle) <= token
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
    return low


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_halvings"])
def _chunk_kernel(
    x_ptr,  # as in _step_kernel
    weight_ptr,
    pool_ptr,  # read
    out_ptr,
    slots_ptr,
    seq_lens_ptr,
    starts_ptr,
    places_ptr,
    tables_ptr,
    table_stride,
    first_row,
    num_rows,
    num_halvings,
    x_stride,
    pool_stride,
    NUM_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Program (tile of tokens, tile of channels), for the tokens of the rows from `first_row` on. `num_halvings` are
    enough to find one of them; it is no constant, so that no other number of rows compiles anew."""
    token = tl.load(starts_ptr + first_row) + tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    end = tl.load(starts_ptr + num_rows)
    is_token = token < end
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    in_channels = channel < NUM_CHANNELS
    inside = is_token[:, None] & in_channels
    row = _row_of_token(tl.minimum(token, end - 1), starts_ptr, first_row, num_rows, num_halvings)
    start = tl.load(starts_ptr + row)
    before = tl.load(seq_lens_ptr + row) - (tl.load(starts_ptr + row + 1) - start)
    # Some inputs of a row's first tokens are in the state that it goes on from.
    reads_state = is_token & (token - start < TAPS - 1) & (before > 0)
    places = tl.load(slots_ptr + row) * table_stride + tl.maximum(before - 1, 0) // BLOCK_SIZE
    source = tl.load(tables_ptr + places, mask=reads_state, other=0).to(tl.int64)
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        at = token - (TAPS - 1 - tap)
        value = tl.load(
            x_ptr + at[:, None].to(tl.int64) * x_stride + channel, mask=inside & (at >= start)[:, None], other=0.0
        ).to(tl.float32)
        value += tl.load(
            pool_ptr + source[:, None] * pool_stride + (tap + token - start)[:, None] * NUM_CHANNELS + channel,
            mask=inside & ((at < start) & (source > 0))[:, None],
            other=0.0,
        ).to(tl.float32)
        total += value * tl.load(weight_ptr + channel * TAPS + tap, mask=in_channels, other=0.0).to(tl.float32)
    out = total * tl.sigmoid(total)
    out_ptrs = out_ptr + token[:, None].to(tl.int64) * NUM_CHANNELS + channel
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_row"])
def _keep_inputs_kernel(
    x_ptr,  # as in _step_kernel
    pool_ptr,
    slots_ptr,
    seq_lens_ptr,
    starts_ptr,
    places_ptr,
    tables_ptr,
    table_stride,
    first_row,
    x_stride,
    pool_stride,
    NUM_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Program (row - first_row, tile of channels). It stores the last inputs of each column of the row that has a
    block."""
    row = tl.program_id(0) + first_row
    start, end, before, source = row_of(row, slots_ptr, seq_lens_ptr, starts_ptr, tables_ptr, table_stride, BLOCK_SIZE)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < NUM_CHANNELS
    first = start
    while first < end:
        first = tl.minimum(first + BLOCK_SIZE - (before + first - start) % BLOCK_SIZE, end)
        block = tl.load(places_ptr + first - 1) // BLOCK_SIZE
        if block > 0:
            # As in _step_kernel, no entry is read that was overwritten.
            for tap in tl.static_range(1, TAPS):
                at = first - (TAPS - tap)
                value = tl.load(
                    x_ptr + at.to(tl.int64) * x_stride + channel, mask=inside & (at >= start), other=0.0
                ).to(pool_ptr.dtype.element_ty)
                value += tl.load(
                    pool_ptr + source * pool_stride + (tap + first - 1 - start) * NUM_CHANNELS + channel,
                    mask=inside & (at < start) & (source > 0),
                    other=0.0,
                )
                tl.debug_barrier()
                tl.store(pool_ptr + block * pool_stride + (tap - 1) * NUM_CHANNELS + channel, value, mask=inside)


def causal_conv(x: Tensor, weight: Tensor, pool: Tensor, rows: StateRows) -> Tensor:
    """See `nvcli.kernels.causal_conv.causal_conv`."""
    num_channels, taps = weight.shape
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert pool[0].is_contiguous()
    num_rows, num_single = len(rows.slots), rows.num_single_rows
    # Tokens that belong to no row stay zeros.
    out = (torch.empty if num_rows == num_single else torch.zeros)(x.shape, dtype=x.dtype, device=x.device)
    strides, arguments = (x.stride(0), pool.stride(0)), row_arguments(rows)
    sizes = {"NUM_CHANNELS": num_channels, "TAPS": taps, "BLOCK_SIZE": rows.block_size}
    if num_single:
        grid = num_single, ceil_div(num_channels, _STEP_CHANNELS)
        _step_kernel[grid](x, weight, pool, out, *arguments, *strides, **sizes, CHANNELS=_STEP_CHANNELS)
    if num_rows > num_single:
        num_tokens, tiles = len(x) - num_single, ceil_div(num_channels, _CHANNELS)
        _chunk_kernel[ceil_div(num_tokens, _TOKENS), tiles](
            x,
            weight,
            pool,
            out,
            *arguments,
            num_single,
            num_rows,
            (num_rows - num_single).bit_length(),
            *strides,
            **sizes,
            TOKENS=_TOKENS,
            CHANNELS=_CHANNELS,
        )
        _keep_inputs_kernel[num_rows - num_single, tiles](
            x, pool, *arguments, num_single, *strides, **sizes, CHANNELS=_CHANNELS
        )
    return out
