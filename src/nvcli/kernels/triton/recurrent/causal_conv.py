"""The short causal convolution in Triton, in three kernels: one for decode rows, which also updates the states of rows
without drafts; one for the tokens of all chunks, which reads the states; and one, launched last, that stores the new
states of chunks.

A row may read its state from a block and write its new state to the same block, so no program of a launch reads what
another one writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.kept_inputs import KeptInputs
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.triton.recurrent.gates import LOG2_E
from nvcli.kernels.triton.recurrent.state_rows import RowTensors, row_of, row_of_token
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_STEP_CHANNELS = 1024
"""Measured on an H200 with 256 rows of 8,192 channels: 9.3 µs; 12.4 with 512, 11 with 2,048."""
_DRAFT_CHANNELS = 512
"""Measured on an H200 with 128 rows of 8 tokens and 8,192 channels: 29 µs; 49 with 256."""
_MOST_ROWS = 4
"""The tokens that a sum spans, up to which a program for decode rows has so many channels; with more, fewer."""
_TOKENS, _CHANNELS = tl.constexpr(16), tl.constexpr(512)
"""Measured on an H200 with 8,204 tokens of 14 rows and 8,192 channels: 114 µs; 130 with 1,024 channels, 169 with twice
the tokens. Memory traffic alone takes 62."""


@triton.jit
def _bias_of(bias_ptr, channel, inside):
    """Return the bias of channels [1, CHANNELS] in float32; 0 if there is none."""
    return 0.0 if bias_ptr is None else tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _taps_of(weight_ptr, factor_ptr, channel, tap, mask, TAPS: tl.constexpr, ADDS_INPUT: tl.constexpr):
    """Return some taps of channels in float32, 0 where `mask` is false."""
    weight = tl.load(weight_ptr + channel * TAPS + tap, mask=mask, other=0.0).to(tl.float32)
    if ADDS_INPUT:
        weight += tl.where(mask & (tap == TAPS - 1), 1.0, 0.0)
    if factor_ptr is not None:
        weight *= tl.load(factor_ptr).to(tl.float32)
    return weight


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp2(x * -LOG2_E))


@triton.jit
def _decode_kernel(
    x_ptr,  # [T, NUM_CHANNELS], rows x_stride apart
    weight_ptr,  # [NUM_CHANNELS, TAPS]
    bias_ptr,  # None, or [NUM_CHANNELS]
    factor_ptr,  # None, or [1]
    pool_ptr,  # [num_blocks, SPAN - 1, NUM_CHANNELS], blocks pool_stride apart, read, and written without drafts
    out_ptr,  # [T, NUM_CHANNELS], written
    kept_ptr,  # [T, NUM_CHANNELS], written; None: rows have no drafts
    rows,  # `RowTensors`
    x_stride,
    pool_stride,
    NUM_CHANNELS: tl.constexpr,
    STATE_WIDTH: tl.constexpr,  # the channels of the whole state: rows of pool_ptr and kept_ptr are as far apart
    TAPS: tl.constexpr,
    DILATION: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ACTIVATES: tl.constexpr,
    ADDS_INPUT: tl.constexpr,
    CHANNELS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row, tile of channels), for a row of one token, or for one with drafts, whose tokens are computed one
    after another. A sum spans SPAN tokens, of which every DILATION-th one has a tap."""
    SPAN: tl.constexpr = (TAPS - 1) * DILATION + 1
    await_kernel_before(DEPENDENT)
    start, end, _, source = row_of(tl.program_id(0), rows, BLOCK_SIZE)
    tap = tl.arange(0, triton.next_power_of_2(SPAN))[:, None]
    has_weight = (tap < SPAN) & (tap % DILATION == 0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = channel < NUM_CHANNELS
    if kept_ptr is None:
        target = tl.load(rows.places + start) // BLOCK_SIZE
        is_before = inside & (tap < SPAN - 1) & (source > 0)
        before = tl.load(pool_ptr + source * pool_stride + tap * STATE_WIDTH + channel, mask=is_before, other=0.0)
        own = tl.load(x_ptr + start.to(tl.int64) * x_stride + channel, mask=inside, other=0.0).to(before.dtype)
        value = tl.where(tap == SPAN - 1, own, before)
        weight = _taps_of(weight_ptr, factor_ptr, channel, tap // DILATION, inside & has_weight, TAPS, ADDS_INPUT)
        total = tl.sum(value.to(tl.float32) * weight, 0)[None, :]
        total += _bias_of(bias_ptr, channel, inside)
        out = _silu(total) if ACTIVATES else total
        out_ptr += start.to(tl.int64) * NUM_CHANNELS + channel
        tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=inside)
        # Input i becomes entry i - 1 of the next state. A row may write to the block that it read, hence the barrier.
        tl.debug_barrier()
        is_kept = inside & (tap > 0) & (tap < SPAN) & (target > 0)
        tl.store(pool_ptr + target * pool_stride + (tap - 1) * STATE_WIDTH + channel, value, mask=is_kept)
    else:
        weight = _taps_of(weight_ptr, factor_ptr, channel, tap // DILATION, inside & has_weight, TAPS, ADDS_INPUT)
        bias = _bias_of(bias_ptr, channel, inside)
        for index in range(end - start):
            place = tap + index  # the state's entries, then the row's tokens
            is_before = inside & (tap < SPAN) & (place < SPAN - 1) & (source > 0)
            is_own = inside & (tap < SPAN) & (place >= SPAN - 1)
            entries = pool_ptr + source * pool_stride + place * STATE_WIDTH + channel
            before = tl.load(entries, mask=is_before, other=0.0)
            at = (start + place - (SPAN - 1)).to(tl.int64)
            own = tl.load(x_ptr + at * x_stride + channel, mask=is_own, other=0.0)
            value = tl.where(place >= SPAN - 1, own.to(before.dtype), before)
            total = tl.sum(value.to(tl.float32) * weight, 0)[None, :] + bias
            out = _silu(total) if ACTIVATES else total
            places = (start.to(tl.int64) + index) * NUM_CHANNELS + channel
            tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=inside)
            kept_places = (start.to(tl.int64) + index) * STATE_WIDTH + channel
            tl.store(kept_ptr + kept_places + 0 * tap, own, mask=is_own & (tap == SPAN - 1))


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_halvings", "num_tokens"])
def _chunk_kernel(
    x_ptr,  # as in _decode_kernel
    weight_ptr,
    bias_ptr,
    factor_ptr,
    pool_ptr,  # read
    out_ptr,
    rows,
    first_row,
    num_rows,
    num_halvings,
    num_tokens,
    x_stride,
    pool_stride,
    NUM_CHANNELS: tl.constexpr,
    STATE_WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    DILATION: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ACTIVATES: tl.constexpr,
    ADDS_INPUT: tl.constexpr,
):
    """Program (tile of tokens, tile of channels), for the tokens of the rows from `first_row` on. Tokens after the last
    row get zeros. A row is found in `num_halvings` steps; this is not a constant, because each new number of rows would
    then be compiled. Every input is read once: the last ones stay in registers from token to token."""
    SPAN: tl.constexpr = (TAPS - 1) * DILATION + 1
    first = tl.load(rows.starts + first_row) + tl.program_id(0) * _TOKENS
    end = tl.load(rows.starts + num_rows)
    last = tl.minimum(first + _TOKENS, end)
    channel = tl.program_id(1) * _CHANNELS + tl.arange(0, _CHANNELS)
    inside = channel < NUM_CHANNELS
    bias = _bias_of(bias_ptr, channel, inside)
    weights = ()
    for tap in tl.static_range(TAPS):
        weight = _taps_of(weight_ptr, factor_ptr, channel, tap, inside, TAPS, ADDS_INPUT)
        weights += (weight,)  # type: ignore[assignment]
    x_ptr += channel
    out_ptr += channel
    row = row_of_token(first, rows.starts, first_row, num_rows, num_halvings)
    begin = first
    while begin < last:  # the part of each row that lies in the tile
        start, row_end, _, source = row_of(row, rows, BLOCK_SIZE)
        part_end = tl.minimum(row_end, last)
        part_ptr = x_ptr + begin.to(tl.int64) * x_stride
        part_out_ptr = out_ptr + begin.to(tl.int64) * NUM_CHANNELS
        # The inputs right before the part, those before the row from the state that it continues from.
        inputs = ()
        for place in tl.static_range(SPAN - 1):
            at = begin + place - (SPAN - 1)
            is_own = (part_end > begin) & (at >= start)
            is_kept = (part_end > begin) & (at < start) & (source > 0)
            value = tl.load(part_ptr + (place - (SPAN - 1)) * x_stride, mask=inside & is_own, other=0.0).to(tl.float32)
            entry = source * pool_stride + (SPAN - 1 + at - start) * STATE_WIDTH
            value += tl.load(pool_ptr + entry + channel, mask=inside & is_kept, other=0.0).to(tl.float32)
            inputs += (value,)  # type: ignore[assignment]
        # All loads are on their way before the first store, which the compiler moves none ahead of.
        own = ()
        for index in tl.static_range(_TOKENS):
            mask = inside & (begin + index < part_end)
            own += (tl.load(part_ptr + index * x_stride, mask=mask, other=0.0),)  # type: ignore[assignment]
        for index in tl.static_range(_TOKENS):
            inputs += (own[index].to(tl.float32),)  # type: ignore[assignment]
            total = bias
            for tap in tl.static_range(TAPS):
                total += inputs[tap * DILATION] * weights[tap]
            out = _silu(total) if ACTIVATES else total
            mask = inside & (begin + index < part_end)
            tl.store(part_out_ptr + index * NUM_CHANNELS, out.to(out_ptr.dtype.element_ty), mask=mask)
            inputs = inputs[1:]
        begin = tl.maximum(begin, row_end)
        row += 1
    for index in tl.static_range(_TOKENS):
        is_nobody = (first + index >= end) & (first + index < num_tokens)
        nothing = tl.zeros([_CHANNELS], out_ptr.dtype.element_ty)
        tl.store(out_ptr + (first + index).to(tl.int64) * NUM_CHANNELS, nothing, mask=inside & is_nobody)


@triton.jit
def _keep_inputs(
    x_ptr,  # as in _decode_kernel, at its channels
    pool_ptr,
    start,
    end,
    source,
    block,
    x_stride,
    pool_stride,
    inside,
    STATE_WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Store the last inputs before token `end` of a row that begins at token `start`. As in _decode_kernel, no entry is
    read after it was overwritten."""
    for place in tl.static_range(1, SPAN):
        at = end - (SPAN - place)
        own = tl.load(x_ptr + at.to(tl.int64) * x_stride, mask=inside & (at >= start), other=0.0)
        before = tl.load(
            pool_ptr + source * pool_stride + (place + end - 1 - start) * STATE_WIDTH,
            mask=inside & (at < start) & (source > 0),
            other=0.0,
        )
        tl.debug_barrier()
        value = own.to(pool_ptr.dtype.element_ty) + before
        tl.store(pool_ptr + block * pool_stride + (place - 1) * STATE_WIDTH, value, mask=inside)


@triton.jit(do_not_specialize=["first_row"])
def _keep_inputs_kernel(
    x_ptr,  # as in _decode_kernel
    pool_ptr,
    rows,
    first_row,
    x_stride,
    pool_stride,
    NUM_CHANNELS: tl.constexpr,
    STATE_WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (row - first_row, tile of channels): stores the last inputs of each of the row's columns that has a
    block. The block that the row has read from comes last: inputs before the row may be in the state of any column."""
    row = tl.program_id(0) + first_row
    start, end, before, source = row_of(row, rows, BLOCK_SIZE)
    channel = tl.program_id(1) * _CHANNELS + tl.arange(0, _CHANNELS)
    inside = channel < NUM_CHANNELS
    x_ptr += channel
    pool_ptr += channel
    first = start
    end_in_source = start
    while first < end:
        first = tl.minimum(first + BLOCK_SIZE - (before + first - start) % BLOCK_SIZE, end)
        block = tl.load(rows.places + first - 1) // BLOCK_SIZE
        if (block > 0) & (block != source):
            _keep_inputs(x_ptr, pool_ptr, start, first, source, block, x_stride, pool_stride, inside, STATE_WIDTH, SPAN)
        end_in_source = tl.where((block > 0) & (block == source), first, end_in_source)
    if end_in_source > start:
        _keep_inputs(
            x_ptr, pool_ptr, start, end_in_source, source, source, x_stride, pool_stride, inside, STATE_WIDTH, SPAN
        )


def causal_conv(
    x: Tensor,
    weight: Tensor,
    pool: Tensor,
    rows: StateRows,
    kept: KeptInputs | None = None,
    bias: Tensor | None = None,
    *,
    activates: bool = True,
    adds_input: bool = False,
    factor: Tensor | None = None,
    dilation: int = 1,
) -> Tensor:
    """See `nvcli.kernels.causal_conv.causal_conv`."""
    num_channels, taps = weight.shape
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert bias is None or bias.is_contiguous()
    assert pool.stride(2) == 1
    num_rows, first_chunk = len(rows.slots), rows.num_decode_rows
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    strides, tensors = (x.stride(0), pool.stride(0)), RowTensors.of(rows)
    span = (taps - 1) * dilation + 1
    of_span = {"NUM_CHANNELS": num_channels, "STATE_WIDTH": pool.stride(1), "BLOCK_SIZE": rows.block_size}
    sizes = {**of_span, "TAPS": taps, "DILATION": dilation}
    ways = {"ACTIVATES": activates, "ADDS_INPUT": adds_input}
    if first_chunk:
        has_drafts = rows.num_draft_rows > 0
        assert not has_drafts or (kept is not None and kept.inputs.stride() == pool.stride()[1:])
        channels = _DRAFT_CHANNELS if has_drafts else _STEP_CHANNELS
        channels = channels * _MOST_ROWS // max(_MOST_ROWS, next_power_of_2(span))
        _decode_kernel[first_chunk, ceil_div(num_channels, channels)](
            x,
            weight,
            bias,
            factor,
            pool,
            out,
            kept.inputs if kept is not None and has_drafts else None,
            tensors,
            *strides,
            **sizes,
            **ways,
            CHANNELS=channels,
            **({"DEPENDENT": False} if has_drafts else dependent(x.device)),
        )
    if num_rows > first_chunk:
        num_tokens, tiles = len(x) - first_chunk, ceil_div(num_channels, _CHANNELS.value)
        _chunk_kernel[ceil_div(num_tokens, _TOKENS.value), tiles](
            x,
            weight,
            bias,
            factor,
            pool,
            out,
            tensors,
            first_chunk,
            num_rows,
            (num_rows - first_chunk).bit_length(),
            len(x),
            *strides,
            **sizes,
            **ways,
        )
        of_span["SPAN"] = span
        _keep_inputs_kernel[num_rows - first_chunk, tiles](x, pool, tensors, first_chunk, *strides, **of_span)
    return out
