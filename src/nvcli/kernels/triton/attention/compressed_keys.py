"""Keys that stand for several tokens each: a program stores the numbers of a token, and one for each token that fills a
window makes the key of it.

Shapes: T tokens, D numbers of a key, of which the last R are rotated, W numbers of a token's values, of one series of D
or of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.chosen_keys import KeyWeights, TokenKeys
from nvcli.kernels.whole_numbers import next_power_of_2

_ROWS, _WARPS = 16, 8
"""The most tokens of a window that are read at a time."""
_STORED = 1024
"""The numbers of a token that are stored at a time."""


@triton.jit
def _store_inputs_kernel(
    rows,  # [T, SIZE], row_stride apart
    cache,  # blocks block_stride apart, tokens CACHE_ROW
    slot_mapping,  # [T] int64
    row_stride: tl.int64,
    block_stride: tl.int64,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_ROW: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Program (token, NUMBERS of its numbers)."""
    token = tl.program_id(0).to(tl.int64)
    numbers = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    slot = tl.load(slot_mapping + token)
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * CACHE_ROW
    row = tl.load(rows + token * row_stride + numbers, mask=numbers < SIZE)
    tl.store(cache + place + numbers, row.to(cache.dtype.element_ty), mask=numbers < SIZE)


@triton.jit
def _mean(
    inputs,
    table,
    bias,
    first,
    block_stride,
    numbers,
    is_number,
    SIZE: tl.constexpr,
    RATE: tl.constexpr,
    SERIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_ROW: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return some numbers of the mean of a key's tokens, of which the first has the position `first`."""
    WIDTH: tl.constexpr = SERIES * SIZE
    highest = tl.full(numbers.shape, -1e30, tl.float32)
    total = tl.zeros(numbers.shape, tl.float32)
    mean = tl.zeros(numbers.shape, tl.float32)
    for start in tl.range(0, SERIES * RATE, ROWS):
        lane = start + tl.arange(0, ROWS)
        position = first + lane
        is_token = (lane < SERIES * RATE) & (position >= 0)
        position = tl.where(is_token, position, 0)
        block = tl.load(table + position // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        column = lane // RATE * SIZE  # of the series that counts
        place = block * block_stride + position % BLOCK_SIZE * CACHE_ROW + column
        inside = is_token[:, None] & is_number[None, :]
        value = tl.load(inputs + place[:, None] + numbers[None, :], mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(inputs + place[:, None] + WIDTH + numbers[None, :], mask=inside, other=0.0).to(tl.float32)
        of_bias = lane % RATE * WIDTH + column
        gate += tl.load(bias + of_bias[:, None] + numbers[None, :], mask=inside, other=0.0)
        gate = tl.where(inside, gate, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(gate, 0))
        decay = tl.exp(highest - new_highest)
        weight = tl.exp(gate - new_highest[None, :])
        total = total * decay + tl.sum(weight, 0)
        mean = mean * decay + tl.sum(weight * value, 0)
        highest = new_highest
    return mean / tl.where(is_number, total, 1.0)


@triton.jit(
    do_not_specialize=["table_stride", "key_table_stride"], do_not_specialize_on_alignment=["tables", "key_tables"]
)
def _compress_keys_kernel(
    inputs,  # blocks block_stride apart, tokens CACHE_ROW: values and gates
    seen,  # [T] int32
    slots,  # [T] int64
    tables,  # [slots, ...] int32, rows table_stride apart
    keys,  # blocks key_block_stride apart, keys KEY_ROW, written
    key_tables,  # [slots, ...] int32, rows key_table_stride apart
    angles,  # [positions, ROTATED] float32, cosines then sines
    bias,  # [RATE, SERIES x SIZE] float32
    weights,  # [SIZE]
    eps,
    block_stride: tl.int64,
    key_block_stride: tl.int64,
    table_stride,
    key_table_stride,
    SIZE: tl.constexpr,
    ROTATED: tl.constexpr,
    RATE: tl.constexpr,
    SERIES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CACHE_ROW: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    KEY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE, rounded up to a power of two
    ROWS: tl.constexpr,
):
    """Program (token)."""
    token = tl.program_id(0).to(tl.int64)
    count = tl.load(seen + token)
    if (count == 0) | (count % RATE != 0):
        return
    slot = tl.load(slots + token)
    table = tables + slot * table_stride
    first = count - SERIES * RATE
    numbers = tl.arange(0, BLOCK)
    inside = numbers < SIZE
    mean = _mean(
        inputs, table, bias, first, block_stride, numbers, inside, SIZE, RATE, SERIES, BLOCK_SIZE, CACHE_ROW, ROWS
    )
    mean *= tl.rsqrt(tl.sum(mean * mean, 0) / SIZE + eps)
    mean *= tl.load(weights + numbers, mask=inside, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(mean, [BLOCK // 2, 2]))
    HALF: tl.constexpr = ROTATED // 2
    FIRST: tl.constexpr = SIZE // 2 - HALF
    pair = tl.arange(0, BLOCK // 2)
    turned, is_pair, is_turned = pair - FIRST, pair < SIZE // 2, pair >= FIRST
    angle = angles + (count - RATE).to(tl.int64) * ROTATED + turned
    cosine = tl.load(angle, mask=is_pair & is_turned, other=1.0)
    sine = tl.load(angle + HALF, mask=is_pair & is_turned, other=0.0)
    number = count // RATE - 1
    block = tl.load(key_tables + slot * key_table_stride + number // BLOCK_KEYS).to(tl.int64)
    key = keys + block * key_block_stride + number % BLOCK_KEYS * KEY_ROW
    dtype = keys.dtype.element_ty
    # Rotated numbers are left in the order of pairs (i, i + ROTATED / 2).
    first_place = tl.where(is_turned, 2 * FIRST + turned, 2 * pair)
    second_place = tl.where(is_turned, first_place + HALF, first_place + 1)
    tl.store(key + first_place, (even * cosine - odd * sine).to(dtype), mask=is_pair)
    tl.store(key + second_place, (odd * cosine + even * sine).to(dtype), mask=is_pair)


def store_inputs(rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """See `nvcli.kernels.compressed_keys.store_inputs`."""
    num_tokens, size = rows.shape
    assert rows.stride(1) == cache.stride(2) == 1
    _store_inputs_kernel[num_tokens, triton.cdiv(size, _STORED)](
        rows,
        cache,
        slot_mapping,
        rows.stride(0),
        cache.stride(0),
        SIZE=size,
        BLOCK_SIZE=cache.shape[1],
        CACHE_ROW=cache.stride(1),
        NUMBERS=_STORED,
        num_warps=4,
    )


def compress_keys(
    inputs: Tensor,
    tokens: TokenKeys,
    keys: Tensor,
    tables: Tensor,
    angles: Tensor,
    weights: KeyWeights,
) -> None:
    """See `nvcli.kernels.compressed_keys.compress_keys`."""
    rate, width = weights.bias.shape
    size, rotated = keys.shape[2], angles.shape[1]
    assert size % 2 == rotated % 2 == 0
    assert weights.bias.is_contiguous()
    assert angles.is_contiguous()
    assert inputs.stride(2) == keys.stride(2) == tables.stride(1) == tokens.tables.stride(1) == 1
    _compress_keys_kernel[(len(tokens.seen),)](
        inputs,
        *tokens,
        keys,
        tables,
        angles,
        *weights,
        inputs.stride(0),
        keys.stride(0),
        tokens.tables.stride(0),
        tables.stride(0),
        SIZE=size,
        ROTATED=rotated,
        RATE=rate,
        SERIES=width // size,
        BLOCK_SIZE=inputs.shape[1],
        CACHE_ROW=inputs.stride(1),
        BLOCK_KEYS=keys.shape[1],
        KEY_ROW=keys.stride(1),
        BLOCK=next_power_of_2(size),
        ROWS=min(_ROWS, next_power_of_2(width // size * rate)),
        num_warps=_WARPS,
    )
