"""Residual streams that run side by side, in two kernels for each block: one adds the result of the block before to the
streams and multiplies them by the weight of the shares, and the other makes shares of the products, the block's input,
and its norm.

Shapes: T tokens, N streams, H hidden, S shares of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.stream_settings import StreamSettings
from nvcli.kernels.streams import ShareWeights
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2, warps_of_row

_TOKENS, _COLUMNS = 32, 32
"""The tile of the first kernel: tokens, and columns of each stream at a time. For four streams of 2,816 numbers an H200
takes 174 µs for 4,096 tokens and 12 for 256; 282 and 15 with 16 tokens, 307 and 17 with 64 columns of these."""
_PROGRAMS = 4
"""Programs of the first kernel to aim for on each multiprocessor."""


@triton.jit
def _multiply(values, weight, products):
    """Add values × weightᵀ to products: [T, columns], [S, columns] float32, [T, S] float32. A weight that is multiplied
    in bfloat16 is the sum of two such numbers, which have its first 16 bits."""
    if values.dtype == tl.bfloat16:
        high = weight.to(tl.bfloat16)
        low = (weight - high.to(tl.float32)).to(tl.bfloat16)
        products = tl.dot(values, high.T, products)
        return tl.dot(values, low.T, products)
    return tl.dot(values.to(tl.float32), weight.T, products, input_precision="tf32x3")


@triton.jit(do_not_specialize=["num_tokens", "result_part_stride", "result_stride"])
def _advance_kernel(
    streams,  # [T, COUNT × SIZE], contiguous; written, with a result
    result,  # None, or [RESULT_PARTS, T, SIZE], parts result_part_stride apart, rows result_stride
    kept,  # with a result [T, KEPT] float32
    weight,  # None, or [SHARES, COUNT × SIZE] float32
    sums,  # with a weight [T, parts, SHARES + 1] float32, written: products with it, and the sum of squares
    num_tokens,
    result_part_stride,
    result_stride,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    RESULT_PARTS: tl.constexpr,
    KEPT: tl.constexpr,
    SHARES: tl.constexpr,
    LANES: tl.constexpr,  # SHARES, rounded up to a power of two, at least 16
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (TOKENS tokens, part of the columns)."""
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    share = tl.arange(0, LANES)
    rows = streams + token * (COUNT * SIZE)
    await_kernel_before(DEPENDENT)
    products = tl.zeros([TOKENS, LANES], tl.float32)
    squares = tl.zeros([TOKENS], tl.float32)
    for start in range(part * COLUMNS, SIZE, num_parts * COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = is_token[:, None] & (column < SIZE)[None, :]
        places = rows[:, None] + column[None, :]
        old = tl.tuple([])
        for index in tl.static_range(COUNT):
            old += (tl.load(places + index * SIZE, mask=inside, other=0.0),)
        if result is not None:
            addend = tl.zeros([TOKENS, COLUMNS], tl.float32)
            for index in tl.static_range(RESULT_PARTS):
                of_part = result + index * result_part_stride + token * result_stride
                addend += tl.load(of_part[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
            tl.debug_barrier()  # all threads have loaded what another one overwrites
        for index in tl.static_range(COUNT):
            values = old[index]
            if result is not None:
                shares = kept + token * KEPT + index
                total = tl.load(shares, mask=is_token, other=0.0)[:, None] * addend
                if KEPT == COUNT:
                    total += values.to(tl.float32)
                else:
                    for source in tl.static_range(COUNT):
                        of_source = tl.load(shares + (1 + source) * COUNT, mask=is_token, other=0.0)
                        total += of_source[:, None] * old[source].to(tl.float32)
                values = total.to(streams.dtype.element_ty)
                tl.store(places + index * SIZE, values, mask=inside)
            if weight is not None:
                squares += tl.sum(values.to(tl.float32) * values.to(tl.float32), axis=1)
                factors = weight + share[:, None] * (COUNT * SIZE) + index * SIZE + column[None, :]
                in_weight = (share < SHARES)[:, None] & (column < SIZE)[None, :]
                products = _multiply(values, tl.load(factors, mask=in_weight, other=0.0), products)
    if weight is not None:
        sums += (token * num_parts + part) * (SHARES + 1)
        is_share = is_token[:, None] & (share < SHARES)[None, :]
        tl.store(sums[:, None] + share[None, :], products, mask=is_share)
        tl.store(sums + SHARES, squares, mask=is_token)


@triton.jit
def _logits(sums, num_parts, numbers, inside, factor, scale, base, SHARES: tl.constexpr, PARTS: tl.constexpr):
    """Add up the parts of a token's products with some rows of the weight, and make logits of them."""
    part = tl.arange(0, PARTS)
    places = sums + part[:, None] * (SHARES + 1) + numbers[None, :]
    products = tl.sum(tl.load(places, mask=(part < num_parts)[:, None] & inside[None, :], other=0.0), axis=0)
    return products * factor * scale + tl.load(base + numbers, mask=inside, other=0.0)


@triton.jit
def _balanced(logits, is_share, SETTINGS: tl.constexpr):
    """Return the shares of streams in each other, [from, to]."""
    logits = tl.where(is_share, logits, -float("inf"))
    shares = tl.exp(logits - tl.max(tl.where(is_share, logits, -1e30), axis=1)[:, None])
    shares = tl.where(is_share, shares / tl.maximum(tl.sum(shares, axis=1), 1e-30)[:, None] + SETTINGS.eps, 0.0)
    shares = shares / (tl.sum(shares, axis=0) + SETTINGS.eps)[None, :]
    for _ in range(SETTINGS.iterations - 1):
        shares = shares / (tl.sum(shares, axis=1) + SETTINGS.eps)[:, None]
        shares = shares / (tl.sum(shares, axis=0) + SETTINGS.eps)[None, :]
    return shares


@triton.jit(do_not_specialize=["num_parts"])
def _share_kernel(
    streams,  # [T, COUNT × SIZE], contiguous
    sums,  # [T, num_parts, SHARES + 1] float32
    base,  # [SHARES] float32
    scale,  # [kinds of shares] float32
    norm_weight,  # [SIZE]
    out,  # [T, SIZE], contiguous, written
    kept,  # [T, SHARES - COUNT] float32, written
    norm_eps,
    num_parts,
    SETTINGS: tl.constexpr,  # `StreamSettings`
    SIZE: tl.constexpr,
    SHARES: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two, at least num_parts
    STREAMS: tl.constexpr,  # the streams, rounded up to a power of two
    BLOCK: tl.constexpr,  # SIZE likewise
    DEPENDENT: tl.constexpr,
):
    """Program (token, task): the first task is the block's input, and the second the shares of streams in each
    other."""
    COUNT: tl.constexpr = SETTINGS.count
    token = tl.program_id(0).to(tl.int64)
    await_kernel_before(DEPENDENT)
    sums += token * (num_parts * (SHARES + 1))
    kept += token * (SHARES - COUNT)
    part, stream = tl.arange(0, PARTS), tl.arange(0, STREAMS)
    is_stream = stream < COUNT
    squares = tl.sum(tl.load(sums + part * (SHARES + 1) + SHARES, mask=part < num_parts, other=0.0), axis=0)
    factor = tl.rsqrt(squares / (COUNT * SIZE) + SETTINGS.norm_eps)
    if tl.program_id(1) == 0:
        of_input = _logits(sums, num_parts, stream, is_stream, factor, tl.load(scale), base, SHARES, PARTS)
        of_input = tl.sigmoid(of_input) + SETTINGS.eps
        column = tl.arange(0, BLOCK)
        inside = column < SIZE
        x = tl.zeros([BLOCK], tl.float32)
        for index in tl.static_range(COUNT):
            of_stream = tl.sum(tl.where(stream == index, of_input, 0.0), axis=0)
            places = streams + token * (COUNT * SIZE) + index * SIZE + column
            x += of_stream * tl.load(places, mask=inside, other=0.0).to(tl.float32)
        x = x.to(streams.dtype.element_ty).to(tl.float32)
        normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + norm_eps)
        normed *= tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token * SIZE + column, normed.to(out.dtype.element_ty), mask=inside)
        if SHARES > COUNT:
            numbers = COUNT + stream
            of_result = _logits(sums, num_parts, numbers, is_stream, factor, tl.load(scale + 1), base, SHARES, PARTS)
            of_result = SETTINGS.factor * tl.sigmoid(of_result) + SETTINGS.result_eps
            tl.store(kept + stream, of_result, mask=is_stream)
    else:
        flat = tl.arange(0, STREAMS * STREAMS)
        pair = 2 * COUNT + flat // STREAMS * COUNT + flat % STREAMS
        is_pair = (flat // STREAMS < COUNT) & (flat % STREAMS < COUNT)
        of_pairs = _logits(sums, num_parts, pair, is_pair, factor, tl.load(scale + 2), base, SHARES, PARTS)
        of_streams = _balanced(
            tl.reshape(of_pairs, [STREAMS, STREAMS]), is_stream[:, None] & is_stream[None, :], SETTINGS
        )
        tl.store(kept - COUNT + pair, tl.reshape(of_streams, [STREAMS * STREAMS]), mask=is_pair)


def add_to_streams(streams: Tensor, result: Tensor, kept: Tensor, settings: StreamSettings) -> None:
    """See `nvcli.kernels.streams.add_to_streams`."""
    _advance(streams, result, kept, None, settings)


def read_streams(
    streams: Tensor,
    result: Tensor | None,
    kept: Tensor | None,
    weights: ShareWeights,
    settings: StreamSettings,
    norm_weight: Tensor,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """See `nvcli.kernels.streams.read_streams`."""
    num_tokens, num_shares = len(streams), len(weights.base)
    size = streams.shape[1] // settings.count
    sums = _advance(streams, result, kept, weights.weight, settings)
    assert sums is not None
    out = torch.empty(num_tokens, size, dtype=streams.dtype, device=streams.device)
    next_kept = torch.empty(num_tokens, num_shares - settings.count, dtype=torch.float32, device=streams.device)
    block = next_power_of_2(size)
    _share_kernel[num_tokens, max(1, len(weights.scale) - 1)](
        streams,
        sums,
        weights.base,
        weights.scale,
        norm_weight,
        out,
        next_kept,
        norm_eps,
        sums.shape[1],
        SETTINGS=settings,
        SIZE=size,
        SHARES=num_shares,
        PARTS=next_power_of_2(ceil_div(size, _COLUMNS)),
        STREAMS=next_power_of_2(settings.count),
        BLOCK=block,
        num_warps=warps_of_row(block),
        **dependent(streams.device),
    )
    return out, next_kept


def _advance(
    streams: Tensor, result: Tensor | None, kept: Tensor | None, weight: Tensor | None, settings: StreamSettings
) -> Tensor | None:
    """Launch the first kernel, and return the products with `weight` and sums of squares, in parts [T, parts, S + 1];
    None without a weight."""
    assert streams.is_contiguous()
    num_tokens, size = len(streams), streams.shape[1] // settings.count
    strides = 0, 0
    if result is not None:
        result = result if result.dim() == 3 else result.unsqueeze(0)
        assert result.stride(2) == 1
        assert kept is not None
        assert kept.is_contiguous()
        strides = result.stride(0), result.stride(1)
    tiles, most_parts = ceil_div(num_tokens, _TOKENS), ceil_div(size, _COLUMNS)
    wanted = ceil_div(_PROGRAMS * num_multiprocessors(streams.device), tiles)
    num_parts = min(most_parts, next_power_of_2(wanted))
    num_shares = 0 if weight is None else len(weight)
    sums = None
    if weight is not None:
        sums = torch.empty(num_tokens, num_parts, num_shares + 1, dtype=torch.float32, device=streams.device)
    _advance_kernel[tiles, num_parts](
        streams,
        result,
        kept,
        weight,
        sums,
        num_tokens,
        *strides,
        COUNT=settings.count,
        SIZE=size,
        RESULT_PARTS=0 if result is None else len(result),
        KEPT=settings.num_kept,
        SHARES=num_shares,
        LANES=max(16, next_power_of_2(num_shares)),
        TOKENS=_TOKENS,
        COLUMNS=_COLUMNS,
        num_warps=4,
        **dependent(streams.device),
    )
    return sums
