"""Vectors of n-grams in Triton: a program for each token finds its rows in the table, and one for each token and stream
makes the gate, what it lets through, and what the convolution reads.

Shapes: T tokens, N streams, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels import ngrams as reference
from nvcli.kernels.ngrams import LookupNorms, NGramHashes
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.recurrent.state_rows import RowTensors, row_of, row_of_token
from nvcli.kernels.whole_numbers import next_power_of_2, warps_of_row

_ID_BYTES = tl.constexpr(reference.ID_BYTES)
_LEAST_GATE = tl.constexpr(reference.LEAST_GATE)


@triton.jit(do_not_specialize=["num_rows", "num_halvings", "separator"])
def _rows_kernel(
    ids,  # [T] int32
    kept,  # blocks pool_stride apart, tokens KEPT_ROW: the bytes of an id
    rows,  # `RowTensors`
    hashes,  # `NGramHashes`
    out,  # [T, (ORDER - 1) × HASHES] int64, written
    num_rows,
    num_halvings,
    separator,
    pool_stride: tl.int64,
    ORDER: tl.constexpr,
    HASHES: tl.constexpr,
    KEPT: tl.constexpr,
    KEPT_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (token). See `_chunk_kernel` in causal_conv.py for the search of its row."""
    token = tl.program_id(0)
    row = row_of_token(token, rows.starts, 0, num_rows, num_halvings)
    start, _, _, source = row_of(row, rows, BLOCK_SIZE)
    number = tl.arange(0, triton.next_power_of_2(HASHES))
    is_hash = number < HASHES
    mixed = tl.load(ids + token).to(tl.int64) * tl.load(hashes.factors)
    has_ended = token < 0
    for distance in tl.static_range(1, ORDER):
        at = token - distance
        found = tl.load(ids + at, mask=at >= start, other=0).to(tl.int64)
        entry = kept + source * pool_stride + (KEPT + at - start) * KEPT_ROW
        of_state = tl.zeros([], tl.int64)
        for byte in tl.static_range(_ID_BYTES):
            one = tl.load(entry + byte, mask=(at < start) & (source > 0), other=0.0)
            of_state += one.to(tl.float32).to(tl.int64) << (8 * byte)
        other = tl.where(at >= start, found, of_state - 1)
        has_ended = has_ended | (other < 0) | (other == separator)
        mixed ^= tl.where(has_ended, separator, other) * tl.load(hashes.factors + distance)
        place = (distance - 1) * HASHES + number
        size = tl.load(hashes.sizes + place, mask=is_hash, other=1)
        found_row = mixed % size + tl.load(hashes.firsts + place, mask=is_hash, other=0)
        tl.store(out + token.to(tl.int64) * ((ORDER - 1) * HASHES) + place, found_row, mask=is_hash)


@triton.jit
def _normed(values, weights, inside, eps, SIZE: tl.constexpr):
    """Norm values [BLOCK] float32, of which SIZE count."""
    factor = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    return values * factor * tl.load(weights, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["projected_stride"])
def _gate_kernel(
    projected,  # [T, COUNT × SIZE + SIZE], rows projected_stride apart
    streams,  # [T, COUNT × SIZE], contiguous
    ids,  # [T] int32
    norms,  # `LookupNorms`
    gated,  # [T, COUNT × SIZE], written
    inputs,  # [T, COUNT × SIZE + OTHERS], written
    eps,
    projected_stride,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE, rounded up to a power of two
):
    """Program (token, stream). Numbers are rounded where the reference rounds them."""
    token, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    own = stream * SIZE + column
    dtype = streams.dtype.element_ty
    of_token = projected + token * projected_stride
    key = tl.load(of_token + own, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(of_token + COUNT * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    query = tl.load(streams + token * (COUNT * SIZE) + own, mask=inside, other=0.0).to(tl.float32)
    key = _normed(key, norms.keys + own, inside, eps, SIZE).to(dtype).to(tl.float32)
    query = _normed(query, norms.queries + own, inside, eps, SIZE).to(dtype).to(tl.float32)
    product = tl.sum(key * query, axis=0) / tl.sqrt(SIZE * 1.0)
    root = tl.sqrt(tl.maximum(tl.abs(product), _LEAST_GATE))
    gate = tl.where(product > 0, root, tl.where(product < 0, -root, 0.0))
    result = (tl.sigmoid(gate) * value).to(dtype)
    tl.store(gated + token * (COUNT * SIZE) + own, result, mask=inside)
    inputs += token * (COUNT * SIZE + OTHERS)
    normed = _normed(result.to(tl.float32), norms.inputs + own, inside, eps, SIZE)
    tl.store(inputs + own, normed.to(dtype), mask=inside)
    other = tl.arange(0, triton.next_power_of_2(OTHERS))
    number = tl.load(ids + token) + 1
    byte = tl.where(other < _ID_BYTES, (number >> (8 * tl.minimum(other, 3))) & 255, 0)
    tl.store(inputs + COUNT * SIZE + other, byte.to(tl.float32).to(dtype), mask=(other < OTHERS) & (stream == 0))


def ngram_rows(ids: Tensor, kept: Tensor, rows: StateRows, hashes: NGramHashes, separator: int) -> Tensor:
    """See `nvcli.kernels.ngrams.ngram_rows`."""
    order, num_rows = len(hashes.factors), len(rows.slots)
    assert kept.stride(2) == 1
    out = torch.empty(len(ids), len(hashes.sizes), dtype=torch.int64, device=ids.device)
    _rows_kernel[(len(ids),)](
        ids,
        kept,
        RowTensors.of(rows),
        hashes,
        out,
        num_rows,
        num_rows.bit_length(),
        separator,
        kept.stride(0),
        ORDER=order,
        HASHES=len(hashes.sizes) // (order - 1),
        KEPT=kept.shape[1],
        KEPT_ROW=kept.stride(1),
        BLOCK_SIZE=rows.block_size,
        num_warps=1,
    )
    return out


def gate_lookup(
    projected: Tensor, streams: Tensor, ids: Tensor, norms: LookupNorms, eps: float, num_others: int
) -> tuple[Tensor, Tensor]:
    """See `nvcli.kernels.ngrams.gate_lookup`."""
    assert streams.is_contiguous()
    assert projected.stride(1) == 1
    num_tokens, width = streams.shape
    size = projected.shape[1] - width
    gated = torch.empty_like(streams)
    inputs = torch.empty(num_tokens, width + num_others, dtype=streams.dtype, device=streams.device)
    block = next_power_of_2(size)
    _gate_kernel[num_tokens, width // size](
        projected,
        streams,
        ids,
        norms,
        gated,
        inputs,
        eps,
        projected.stride(0),
        COUNT=width // size,
        SIZE=size,
        OTHERS=num_others,
        BLOCK=block,
        num_warps=warps_of_row(block),
    )
    return gated, inputs
