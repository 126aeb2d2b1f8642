"""The short causal convolution in Triton: a program for each row and some channels, which goes through the row's
tokens. Nothing else touches its part of the states, so it may read and write one block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.state_rows import row_arguments, row_of

_CHANNEL_TILE = 128
_TOKEN_TILE = 16


@triton.jit(do_not_specialize=["first_row"])
def _causal_conv_kernel(
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
    first_row,
    x_stride,
    pool_stride,
    NUM_CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
):
    """Program (row - first_row, tile of channels). Rows have one token where TOKEN_TILE is 1."""
    row = tl.program_id(0) + first_row
    start, end, _, source = row_of(row, slots_ptr, seq_lens_ptr, starts_ptr, tables_ptr, table_stride, BLOCK_SIZE)
    channel = tl.program_id(1) * CHANNEL_TILE + tl.arange(0, CHANNEL_TILE)[None, :]
    inside = channel < NUM_CHANNELS
    tokens = tl.arange(0, TOKEN_TILE)[:, None]
    history_ptr = pool_ptr + source * pool_stride
    for first in range(start, end, TOKEN_TILE):
        token = first + tokens
        is_token = token < end
        place = tl.load(places_ptr + token, mask=is_token, other=0)
        block = place // BLOCK_SIZE
        ends = is_token & (block > 0) & ((token == end - 1) | (place % BLOCK_SIZE == BLOCK_SIZE - 1))
        total = tl.zeros([TOKEN_TILE, CHANNEL_TILE], tl.float32)
        for tap in tl.static_range(TAPS):
            value = tl.load(
                x_ptr + (token - (TAPS - 1 - tap)).to(tl.int64) * x_stride + channel,
                mask=is_token & (token - (TAPS - 1 - tap) >= start) & inside,
                other=0.0,
            ).to(tl.float32)
            value += tl.load(
                history_ptr + (tap + token - start) * NUM_CHANNELS + channel,
                mask=is_token & (token - (TAPS - 1 - tap) < start) & (source > 0) & inside,
                other=0.0,
            ).to(tl.float32)
            total += value * tl.load(weight_ptr + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        out = total * tl.sigmoid(total)
        tl.store(
            out_ptr + token.to(tl.int64) * NUM_CHANNELS + channel,
            out.to(out_ptr.dtype.element_ty),
            mask=is_token & inside,
        )
        # Tap i becomes entry i - 1 of the next state, which no later tap reads: so a block may be its own source.
        for tap in tl.static_range(1, TAPS):
            kept = tl.load(
                x_ptr + (token - (TAPS - 1 - tap)).to(tl.int64) * x_stride + channel,
                mask=ends & (token - (TAPS - 1 - tap) >= start) & inside,
                other=0.0,
            ).to(tl.float32)
            kept += tl.load(
                history_ptr + (tap + token - start) * NUM_CHANNELS + channel,
                mask=ends & (token - (TAPS - 1 - tap) < start) & (source > 0) & inside,
                other=0.0,
            ).to(tl.float32)
            tl.debug_barrier()
            tl.store(
                pool_ptr + block * pool_stride + (tap - 1) * NUM_CHANNELS + channel,
                kept.to(pool_ptr.dtype.element_ty),
                mask=ends & inside,
            )


def causal_conv(x: Tensor, weight: Tensor, pool: Tensor, rows: StateRows) -> Tensor:
    """See `nvcli.kernels.causal_conv.causal_conv`."""
    num_channels, taps = weight.shape
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert pool[0].is_contiguous()
    assert taps - 1 <= _TOKEN_TILE, "the inputs before a row are read with its first tokens"
    num_rows, num_single = len(rows.slots), rows.num_single_rows
    # Tokens that belong to no row stay zeros.
    out = (torch.empty if num_rows == num_single else torch.zeros)(x.shape, dtype=x.dtype, device=x.device)
    for first, count, tile in ((0, num_single, 1), (num_single, num_rows - num_single, _TOKEN_TILE)):
        if count:
            _causal_conv_kernel[count, triton.cdiv(num_channels, _CHANNEL_TILE)](
                x,
                weight,
                pool,
                out,
                *row_arguments(rows),
                first,
                x.stride(0),
                pool.stride(0),
                NUM_CHANNELS=num_channels,
                TAPS=taps,
                BLOCK_SIZE=rows.block_size,
                TOKEN_TILE=tile,
                CHANNEL_TILE=_CHANNEL_TILE,
            )
    return out
