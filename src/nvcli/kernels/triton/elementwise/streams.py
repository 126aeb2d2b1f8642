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

_TOKENS, _COLUMNS, _WARPS = 64, 32, 4
"""The tile of the first kernel: tokens, and columns of each stream at a time. For four streams of 4,096 numbers that go
into each other an H200 takes 343 µs for 8,192 tokens and 14 for 256; 391 and 13 with two tiles on their way in place of
three, 427 and 14 with 128 tokens, and 1,015 and 29 with 32 and nothing on its way."""
_PROGRAMS = 4
"""Programs of the first kernel to aim for on each multiprocessor."""
_FEW_PARTS, _BALANCED = 8, 16
"""With at most _FEW_PARTS parts of a token's sums, as in prompts, a program makes the shares of streams in each other
of _BALANCED tokens; otherwise of one."""

_GATED = 512
"""Columns of each stream that a program multiplies by gates."""


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
    """Program (TOKENS tokens, part of the columns). A thread overwrites numbers that it alone has loaded, with the next
    tiles on their way."""
    tl.static_assert(TOKENS * COLUMNS >= 1024)  # 8 numbers of each thread, so that no two threads hold one
    part, num_parts = tl.program_id(1), tl.num_programs(1)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    share = tl.arange(0, LANES)
    rows = streams + token * (COUNT * SIZE)
    await_kernel_before(DEPENDENT)
    products = tl.zeros([TOKENS, LANES], tl.float32)
    squares = tl.zeros([TOKENS], tl.float32)
    shares = tl.tuple([])
    if result is not None:
        for index in tl.static_range(KEPT):
            shares += (tl.load(kept + token * KEPT + index, mask=is_token, other=0.0),)
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
        for index in tl.static_range(COUNT):
            values = old[index]
            if result is not None:
                total = shares[index][:, None] * addend
                if KEPT == COUNT:
                    total += values.to(tl.float32)
                else:
                    for source in tl.static_range(COUNT):
                        total += shares[(1 + source) * COUNT + index][:, None] * old[source].to(tl.float32)
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
def _balance(
    sums,  # [T, num_parts, SHARES + 1] float32
    base,  # [SHARES] float32
    scale,
    kept,  # [T, SHARES - COUNT] float32, written
    first_token,
    num_tokens,
    num_parts,
    SETTINGS: tl.constexpr,
    SIZE: tl.constexpr,
    SHARES: tl.constexpr,
    PARTS: tl.constexpr,
    STREAMS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Store the shares of streams in each other of TOKENS tokens: [token, from, to]."""
    COUNT: tl.constexpr = SETTINGS.count
    token = first_token + tl.arange(0, TOKENS)
    pair = tl.arange(0, STREAMS * STREAMS)
    row, column = pair // STREAMS, pair % STREAMS
    number = 2 * COUNT + row * COUNT + column
    is_pair = (row < COUNT) & (column < COUNT)
    is_token = token < num_tokens
    part = tl.arange(0, PARTS)
    parts = sums + token.to(tl.int64)[:, None] * (num_parts * (SHARES + 1)) + part[None, :] * (SHARES + 1)
    is_part = is_token[:, None] & (part < num_parts)[None, :]
    squares = tl.sum(tl.load(parts + SHARES, mask=is_part, other=0.0), axis=1)
    factor = tl.rsqrt(squares / (COUNT * SIZE) + SETTINGS.norm_eps)
    is_read = is_part[:, :, None] & is_pair[None, None, :]
    products = tl.sum(tl.load(parts[:, :, None] + number[None, None, :], mask=is_read, other=0.0), axis=1)
    logits = products * factor[:, None] * scale + tl.load(base + number, mask=is_pair, other=0.0)[None, :]
    logits = tl.reshape(tl.where(is_pair[None, :], logits, -float("inf")), [TOKENS, STREAMS, STREAMS])
    shares = tl.exp(logits - tl.maximum(tl.max(logits, axis=2), -1e30)[:, :, None])
    stream = tl.arange(0, STREAMS)
    is_share = (stream < COUNT)[None, :, None] & (stream < COUNT)[None, None, :]
    shares = shares / tl.maximum(tl.sum(shares, axis=2), 1e-30)[:, :, None] + SETTINGS.eps
    shares = tl.where(is_share, shares, 0.0)
    shares = shares / (tl.sum(shares, axis=1) + SETTINGS.eps)[:, None, :]
    for _ in range(SETTINGS.iterations - 1):
        shares = shares / (tl.sum(shares, axis=2) + SETTINGS.eps)[:, :, None]
        shares = shares / (tl.sum(shares, axis=1) + SETTINGS.eps)[:, None, :]
    places = kept + token.to(tl.int64)[:, None] * (SHARES - COUNT) - COUNT + number[None, :]
    flat = tl.reshape(shares, [TOKENS, STREAMS * STREAMS])
    tl.store(places, flat, mask=is_token[:, None] & is_pair[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def _share_kernel(
    streams,  # [T, COUNT × SIZE], contiguous
    sums,  # [T, num_parts, SHARES + 1] float32
    base,  # [SHARES] float32
    scale,  # [kinds of shares] float32
    norm_weight,  # [SIZE]
    out,  # [T, SIZE], contiguous, written
    kept,  # [T, SHARES - COUNT] float32, written
    norm_eps,
    num_tokens,
    num_parts,
    SETTINGS: tl.constexpr,  # `StreamSettings`
    SIZE: tl.constexpr,
    SHARES: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two, at least num_parts
    STREAMS: tl.constexpr,  # the streams, rounded up to a power of two
    BALANCED: tl.constexpr,  # tokens whose shares of streams in each other a program makes
    BLOCK: tl.constexpr,  # SIZE, rounded up to a power of two
    DEPENDENT: tl.constexpr,
):
    """The first programs make shares of streams in each other, if there are any; each other program makes the block's
    input of a token."""
    COUNT: tl.constexpr = SETTINGS.count
    HAS_PAIRS: tl.constexpr = SHARES > 2 * COUNT
    await_kernel_before(DEPENDENT)
    token = tl.program_id(0)
    if HAS_PAIRS:
        first = token * BALANCED
        if first < num_tokens:
            of_pairs = tl.load(scale + 2)
            _balance(
                sums,
                base,
                of_pairs,
                kept,
                first,
                num_tokens,
                num_parts,
                SETTINGS,
                SIZE,
                SHARES,
                PARTS,
                STREAMS,
                BALANCED,
            )
            return
        token -= tl.cdiv(num_tokens, BALANCED)
    token = token.to(tl.int64)
    sums += token * (num_parts * (SHARES + 1))
    stream, column = tl.arange(0, STREAMS), tl.arange(0, BLOCK)
    is_stream, inside = stream < COUNT, column < SIZE
    part = tl.arange(0, PARTS)
    squares = tl.sum(tl.load(sums + part * (SHARES + 1) + SHARES, mask=part < num_parts, other=0.0), axis=0)
    factor = tl.rsqrt(squares / (COUNT * SIZE) + SETTINGS.norm_eps)
    of_input = _logits(sums, num_parts, stream, is_stream, factor, tl.load(scale), base, SHARES, PARTS)
    of_input = tl.sigmoid(of_input) + SETTINGS.eps
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
        of_result = _logits(sums, num_parts, COUNT + stream, is_stream, factor, tl.load(scale + 1), base, SHARES, PARTS)
        of_result = SETTINGS.factor * tl.sigmoid(of_result) + SETTINGS.result_eps
        tl.store(kept + token * (SHARES - COUNT) + stream, of_result, mask=is_stream)


@triton.jit(do_not_specialize=["result_part_stride", "result_stride"])
def _norm_kernel(
    streams,  # [T, COUNT × SIZE], contiguous; written, with a result
    result,  # as in _advance_kernel
    kept,  # with a result [T, COUNT] float32
    weight,  # [COUNT × SIZE]
    out,  # [T, COUNT × SIZE], contiguous, written
    eps,
    result_part_stride,
    result_stride,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    RESULT_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE, rounded up to a power of two
    DEPENDENT: tl.constexpr,
):
    """Program (token, stream)."""
    await_kernel_before(DEPENDENT)
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    own = stream * SIZE + column
    values = tl.load(streams + token * (COUNT * SIZE) + own, mask=inside, other=0.0)
    if result is not None:
        addend = tl.zeros([BLOCK], tl.float32)
        for index in tl.static_range(RESULT_PARTS):
            of_part = result + index * result_part_stride + token * result_stride
            addend += tl.load(of_part + column, mask=inside, other=0.0).to(tl.float32)
        share = tl.load(kept + token * COUNT + stream)
        values = (values.to(tl.float32) + share * addend).to(streams.dtype.element_ty)
        tl.store(streams + token * (COUNT * SIZE) + own, values, mask=inside)
    normed = values.to(tl.float32)
    normed *= tl.rsqrt(tl.sum(normed * normed, axis=0) / SIZE + eps)
    normed *= tl.load(weight + own, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * (COUNT * SIZE) + own, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["logit_stride"])
def _gate_kernel(
    normed,  # [T, COUNT × SIZE], contiguous
    gates,  # likewise
    logits,  # [T, COUNT], rows logit_stride apart
    out,  # [T, SIZE], contiguous, written
    kept,  # [T, COUNT] float32, written; None: there is no block
    logit_stride,
    SETTINGS: tl.constexpr,  # `StreamSettings`
    SIZE: tl.constexpr,
    STREAMS: tl.constexpr,  # the streams, rounded up to a power of two
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (token, BLOCK columns of each stream)."""
    COUNT: tl.constexpr = SETTINGS.count
    await_kernel_before(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(COUNT):
        places = token * (COUNT * SIZE) + index * SIZE + column
        gate = tl.load(gates + places, mask=inside, other=0.0).to(tl.float32)
        total += tl.sigmoid(gate) * tl.load(normed + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + column, (total / COUNT).to(out.dtype.element_ty), mask=inside)
    if kept is not None:
        stream = tl.arange(0, STREAMS)
        is_share = (stream < COUNT) & (tl.program_id(1) == 0)
        logit = tl.load(logits + token * logit_stride + stream, mask=is_share, other=0.0).to(tl.float32)
        share = SETTINGS.factor * tl.sigmoid(logit) + SETTINGS.result_eps
        tl.store(kept + token * COUNT + stream, share, mask=is_share)


def norm_streams(
    streams: Tensor, result: Tensor | None, kept: Tensor | None, settings: StreamSettings, weight: Tensor, eps: float
) -> Tensor:
    """See `nvcli.kernels.streams.norm_streams`."""
    assert streams.is_contiguous()
    result, strides = _parts_of(result, kept)
    size = streams.shape[1] // settings.count
    out, block = torch.empty_like(streams), next_power_of_2(size)
    _norm_kernel[len(streams), settings.count](
        streams,
        result,
        kept,
        weight,
        out,
        eps,
        *strides,
        COUNT=settings.count,
        SIZE=size,
        RESULT_PARTS=0 if result is None else len(result),
        BLOCK=block,
        num_warps=warps_of_row(block),
        **dependent(streams.device),
    )
    return out


def _parts_of(result: Tensor | None, kept: Tensor | None) -> tuple[Tensor | None, tuple[int, int]]:
    """Return a result as its parts [P, T, H], and how far these and their rows are apart."""
    if result is None:
        return None, (0, 0)
    result = result if result.dim() == 3 else result.unsqueeze(0)
    assert result.stride(2) == 1
    assert kept is not None
    assert kept.is_contiguous()
    return result, (result.stride(0), result.stride(1))


def gate_streams(normed: Tensor, gates: Tensor, logits: Tensor, settings: StreamSettings) -> tuple[Tensor, Tensor]:
    """See `nvcli.kernels.streams.gate_streams`."""
    assert normed.is_contiguous()
    assert gates.is_contiguous()
    num_tokens, size = len(normed), normed.shape[1] // settings.count
    out = torch.empty(num_tokens, size, dtype=normed.dtype, device=normed.device)
    kept = torch.empty(num_tokens, logits.shape[1], dtype=torch.float32, device=normed.device)
    block = min(_GATED, next_power_of_2(size))
    _gate_kernel[num_tokens, ceil_div(size, block)](
        normed,
        gates,
        logits,
        out,
        kept if logits.shape[1] else None,
        logits.stride(0),
        SETTINGS=settings,
        SIZE=size,
        STREAMS=next_power_of_2(settings.count),
        BLOCK=block,
        **dependent(normed.device),
    )
    return out, kept


def add_to_streams(streams: Tensor, result: Tensor, kept: Tensor, count: int) -> None:
    """See `nvcli.kernels.streams.add_to_streams`."""
    _advance(streams, result, kept, None, count)


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
    sums = _advance(streams, result, kept, weights.weight, settings.count)
    assert sums is not None
    out = torch.empty(num_tokens, size, dtype=streams.dtype, device=streams.device)
    next_kept = torch.empty(num_tokens, num_shares - settings.count, dtype=torch.float32, device=streams.device)
    block, num_parts = next_power_of_2(size), sums.shape[1]
    has_few = num_parts <= _FEW_PARTS
    balanced = _BALANCED if has_few else 1
    has_pairs = num_shares > 2 * settings.count
    _share_kernel[num_tokens + (ceil_div(num_tokens, balanced) if has_pairs else 0),](
        streams,
        sums,
        weights.base,
        weights.scale,
        norm_weight,
        out,
        next_kept,
        norm_eps,
        num_tokens,
        num_parts,
        SETTINGS=settings,
        SIZE=size,
        SHARES=num_shares,
        PARTS=_FEW_PARTS if has_few else next_power_of_2(ceil_div(size, _COLUMNS)),
        STREAMS=next_power_of_2(settings.count),
        BALANCED=balanced,
        BLOCK=block,
        num_warps=warps_of_row(block),
        **dependent(streams.device),
    )
    return out, next_kept


def _advance(
    streams: Tensor, result: Tensor | None, kept: Tensor | None, weight: Tensor | None, count: int
) -> Tensor | None:
    """Launch the first kernel, and return the products with `weight` and sums of squares, in parts [T, parts, S + 1];
    None without a weight."""
    assert streams.is_contiguous()
    num_tokens, size = len(streams), streams.shape[1] // count
    result, strides = _parts_of(result, kept)
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
        COUNT=count,
        SIZE=size,
        RESULT_PARTS=0 if result is None else len(result),
        KEPT=0 if kept is None else kept.shape[1],
        SHARES=num_shares,
        LANES=max(16, next_power_of_2(num_shares)),
        TOKENS=_TOKENS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
        **dependent(streams.device),
    )
    return sums
