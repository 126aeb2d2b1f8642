"""The selective scan of Mamba-1 for the tokens of prompts, in Triton. Each number of a state decays by itself, so there
are no products of matrices: a program has the states of some channels in registers, and walks through tokens. It reads
several of them at a time, so that the states do not wait for each.

Where rows and channels make enough programs, each walks through a whole row. Otherwise rows are cut into parts, which
programs walk through twice: first from zeros, to find what a part adds to the state that it begins with. Another kernel
joins these, and then the parts are computed from the states that they really begin with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.recurrent_types import ChannelGates, RecurrentHeads
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors
from nvcli.kernels.triton.recurrent.chunk_walk import find_chunk, first_program, num_chunk_programs
from nvcli.kernels.triton.recurrent.gates import LOG2_E, read_rates, read_step_sizes
from nvcli.kernels.triton.recurrent.state_rows import RowTensors, chunk_of, chunk_tokens, row_of
from nvcli.kernels.whole_numbers import ceil_div

_TILE, _TOKENS, _WARPS = tl.constexpr(32), tl.constexpr(4), 1
"""Channels of a program, the tokens that it reads at a time, and its warps: with one, no sum over a channel's state
waits for other warps, and with as many channels as threads a step size is computed once."""
_PART = 256
"""The most tokens of a part of a row."""
_ENOUGH = 6
"""The programs for each multiprocessor from which on rows are not cut into parts. With 8,192 channels an H200 takes 1.2
ms in parts for 8,192 tokens, in however many rows, and whole 3.4 for one row, 1.7 for two, 0.9 for four, 0.6 for eight;
parts of 128 and of 512 tokens take 1.4 and 1.3, tiles of 16 and of 64 channels 2.1 and 1.2."""


@triton.jit
def _walk(
    state,  # [_TILE, keys, rounded up to a power of two] float32
    first,
    count,
    tensors,  # as in _rows_kernel: x_ptr, gates, out_ptr, x_stride, key_stride, step_stride
    i,
    j,
    rates,  # [_TILE, keys, rounded up to a power of two], logarithms to base 2
    HEADS: tl.constexpr,
    WRITES: tl.constexpr,
):
    """Add `count` tokens, from number `first` (int64) on, to the states of channels `j`, and with WRITES store their
    results. Returns the states and the sum of all step sizes."""
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    x_ptr, gates, out_ptr, x_stride, key_stride, step_stride = tensors
    in_key, in_value = i < HEADS.key_dim, j < VALUE_DIM
    bias = tl.load(gates.step_bias + j, mask=in_value, other=0.0).to(tl.float32)
    skip = tl.load(gates.skip + j, mask=in_value, other=0.0).to(tl.float32)
    total = tl.zeros_like(bias)
    for some in range(0, count, _TOKENS):
        token = first + some
        value_ptr, step_ptr = x_ptr + token * x_stride, gates.step + token * step_stride
        key_ptr, query_ptr = gates.keys + token * key_stride, gates.queries + token * key_stride
        values = ()
        steps = ()
        keys = ()
        queries = ()
        for number in tl.static_range(_TOKENS):
            is_token = some + number < count
            is_value, is_key = in_value & is_token, in_key & is_token
            value = tl.load(value_ptr + number * x_stride + j, mask=is_value, other=0.0).to(tl.float32)
            values += (value,)  # type: ignore[assignment]
            step = read_step_sizes(step_ptr + number * step_stride, j, is_value, bias)
            steps += (step,)  # type: ignore[assignment]
            key = tl.load(key_ptr + number * key_stride + i, mask=is_key, other=0.0).to(tl.float32)
            keys += (key,)  # type: ignore[assignment]
            if WRITES:
                query = tl.load(query_ptr + number * key_stride + i, mask=is_key, other=0.0).to(tl.float32)
                queries += (query,)  # type: ignore[assignment]
        for number in tl.static_range(_TOKENS):
            # After the last token a step's size is 0: such tokens write nothing and decay nothing.
            state *= tl.exp2(rates * steps[number][:, None])
            state += (steps[number] * values[number])[:, None] * keys[number][None, :]
            if WRITES:
                out = tl.sum(state * queries[number][None, :], 1) + skip * values[number]
                out_ptrs = out_ptr + token * VALUE_DIM + number * VALUE_DIM + j
                tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_value & (some + number < count))
            else:
                total += steps[number]
    return state, total


@triton.jit
def _clear(out_ptr, first, count, j, VALUE_DIM: tl.constexpr):
    """Store zeros as the results of channels `j` of `count` tokens, which belong to no row."""
    nothing = tl.zeros_like(j).to(out_ptr.dtype.element_ty)
    for number in range(count):
        tl.store(out_ptr + (first.to(tl.int64) + number) * VALUE_DIM + j, nothing, mask=j < VALUE_DIM)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tokens"])
def _rows_kernel(
    x_ptr,  # [T, VALUE_DIM], rows x_stride apart
    gates,  # `ChannelGates`, rows of keys and queries key_stride, of step sizes step_stride apart
    pool_ptr,  # [num_blocks, 1, KEY_DIM, VALUE_DIM] float32, blocks pool_stride apart, read and written
    out_ptr,  # [T, 1, VALUE_DIM], written
    rows,  # `RowTensors`
    first_row,
    num_rows,
    num_tokens,
    x_stride,
    key_stride,
    step_stride,
    pool_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # `RecurrentHeads`
):
    """Program (row - first_row, tile of channels)."""
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    row = tl.program_id(0) + first_row
    start, end, before, source = row_of(row, rows, BLOCK_SIZE)
    i = tl.arange(0, triton.next_power_of_2(KEY_DIM))
    j = tl.program_id(1) * _TILE + tl.arange(0, _TILE)
    inside = (j < VALUE_DIM)[:, None] & (i < KEY_DIM)[None, :]
    places = i[None, :] * VALUE_DIM + j[:, None]
    state = tl.load(pool_ptr + source * pool_stride + places, mask=inside & (source > 0), other=0.0)
    rates = read_rates(gates, i[None, :], j[:, None], inside, KEY_DIM) * LOG2_E
    tensors = x_ptr, gates, out_ptr, x_stride, key_stride, step_stride
    first = start
    while first < end:
        # The tokens of one block, at whose end the state is stored.
        last = tl.minimum(end, first + BLOCK_SIZE - (before + first - start) % BLOCK_SIZE)
        state, _ = _walk(state, first.to(tl.int64), last - first, tensors, i, j, rates, HEADS, True)
        target = tl.load(rows.places + last - 1) // BLOCK_SIZE
        tl.store(pool_ptr + target * pool_stride + places, state, mask=inside & (target > 0))
        first = last
    if row == num_rows - 1:
        _clear(out_ptr, end, num_tokens - end, j, VALUE_DIM)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_halvings"])
def _parts_kernel(
    x_ptr,  # as in _rows_kernel
    gates,
    states_ptr,  # [programs, KEY_DIM, VALUE_DIM] float32: with WRITES the states before the parts, else written
    totals_ptr,  # [programs, VALUE_DIM] float32, written without WRITES: the sums of step sizes
    out_ptr,  # as in _rows_kernel; written with WRITES
    rows,
    first_row,
    num_rows,
    num_halvings,
    x_stride,
    key_stride,
    step_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PART: tl.constexpr,
    WRITES: tl.constexpr,
):
    """Program (part, tile of channels). With WRITES it computes the part's results, else what the part makes of a state
    of zeros."""
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    first, count = find_chunk(tl.program_id(0), rows, first_row, num_rows, num_halvings, BLOCK_SIZE, PART)
    i = tl.arange(0, triton.next_power_of_2(KEY_DIM))
    j = tl.program_id(1) * _TILE + tl.arange(0, _TILE)
    inside = (j < VALUE_DIM)[:, None] & (i < KEY_DIM)[None, :]
    program = tl.program_id(0).to(tl.int64)
    state_ptrs = states_ptr + program * KEY_DIM * VALUE_DIM + i[None, :] * VALUE_DIM + j[:, None]
    if count > 0:
        state = tl.load(state_ptrs, mask=inside & WRITES, other=0.0)
        rates = read_rates(gates, i[None, :], j[:, None], inside, KEY_DIM) * LOG2_E
        tensors = x_ptr, gates, out_ptr, x_stride, key_stride, step_stride
        state, total = _walk(state, first.to(tl.int64), count, tensors, i, j, rates, HEADS, WRITES)
        if not WRITES:
            tl.store(state_ptrs, state, mask=inside)
            tl.store(totals_ptr + program * VALUE_DIM + j, total, mask=j < VALUE_DIM)


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tokens"])
def _join_kernel(
    gates,  # as in _rows_kernel
    states_ptr,  # [programs, KEY_DIM, VALUE_DIM] float32, what parts make of zeros → the states before them
    totals_ptr,  # [programs, VALUE_DIM] float32
    pool_ptr,  # as in _rows_kernel
    out_ptr,
    rows,
    first_row,
    num_rows,
    num_tokens,
    pool_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PART: tl.constexpr,
):
    """Program (row - first_row, tile of channels): the states before each part of a row, and those after blocks; the
    results of tokens after the last row."""
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    PARTS: tl.constexpr = (BLOCK_SIZE + PART - 1) // PART
    row = tl.program_id(0) + first_row
    start, end, before, source = row_of(row, rows, BLOCK_SIZE)
    i = tl.arange(0, triton.next_power_of_2(KEY_DIM))
    j = tl.program_id(1) * _TILE + tl.arange(0, _TILE)
    inside = (j < VALUE_DIM)[:, None] & (i < KEY_DIM)[None, :]
    places = i[None, :] * VALUE_DIM + j[:, None]
    state = tl.load(pool_ptr + source * pool_stride + places, mask=inside & (source > 0), other=0.0)
    rates = read_rates(gates, i[None, :], j[:, None], inside, KEY_DIM) * LOG2_E
    program = first_program(start, row, tl.load(rows.starts + first_row), first_row, PARTS, BLOCK_SIZE).to(tl.int64)
    first_part = chunk_of(before, BLOCK_SIZE, PART)
    num_parts = chunk_of(before + end - start - 1, BLOCK_SIZE, PART) - first_part + 1
    num_parts = tl.where(end > start, num_parts, 0)
    for number in range(num_parts):
        part_ptrs = states_ptr + (program + number) * KEY_DIM * VALUE_DIM + places
        added = tl.load(part_ptrs, mask=inside, other=0.0)
        total = tl.load(totals_ptr + (program + number) * VALUE_DIM + j, mask=j < VALUE_DIM, other=0.0)
        tl.store(part_ptrs, state, mask=inside)
        state = state * tl.exp2(rates * total[:, None]) + added
        part = first_part + number
        if (number == num_parts - 1) | ((part + 1) % PARTS == 0):
            first, count = chunk_tokens(part, start, end, before, BLOCK_SIZE, PART)
            target = tl.load(rows.places + first + count - 1) // BLOCK_SIZE
            tl.store(pool_ptr + target * pool_stride + places, state, mask=inside & (target > 0))
    if row == num_rows - 1:
        _clear(out_ptr, end, num_tokens - end, j, VALUE_DIM)


def compute_chunks(
    x: Tensor, gates: ChannelGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, out: Tensor
) -> None:
    """Compute the rows after the decode rows into `out`, as `nvcli.kernels.channel_scan.channel_scan` does, with zeros
    for tokens after the last row."""
    num_rows, first_row = len(rows.slots), rows.num_decode_rows
    num_tiles = ceil_div(heads.value_dim, _TILE.value)
    if (num_rows - first_row) * num_tiles < _ENOUGH * num_multiprocessors(x.device):
        _compute_parts(x, gates, pool, rows, heads, out)
        return
    _rows_kernel[num_rows - first_row, num_tiles](
        x,
        gates,
        pool,
        out,
        RowTensors.of(rows),
        first_row,
        num_rows,
        len(x),
        x.stride(0),
        gates.keys.stride(0),
        gates.step.stride(0),
        pool.stride(0),
        BLOCK_SIZE=rows.block_size,
        HEADS=heads,
        num_warps=_WARPS,
    )


def _compute_parts(
    x: Tensor, gates: ChannelGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, out: Tensor
) -> None:
    """Compute the rows in parts."""
    num_rows, first_row = len(rows.slots), rows.num_decode_rows
    num_tiles, num_parts = ceil_div(heads.value_dim, _TILE.value), num_chunk_programs(len(x), rows, _PART)
    states = torch.empty(num_parts, heads.key_dim, heads.value_dim, dtype=torch.float32, device=x.device)
    totals = torch.empty(num_parts, heads.value_dim, dtype=torch.float32, device=x.device)
    row_tensors, sizes = RowTensors.of(rows), {"BLOCK_SIZE": rows.block_size, "HEADS": heads}

    def walk(*, writes: bool) -> None:
        _parts_kernel[num_parts, num_tiles](
            x,
            gates,
            states,
            totals,
            out,
            row_tensors,
            first_row,
            num_rows,
            (num_rows - first_row).bit_length(),
            x.stride(0),
            gates.keys.stride(0),
            gates.step.stride(0),
            **sizes,
            PART=_PART,
            WRITES=writes,
            num_warps=_WARPS,
        )

    walk(writes=False)
    _join_kernel[num_rows - first_row, num_tiles](
        gates,
        states,
        totals,
        pool,
        out,
        row_tensors,
        first_row,
        num_rows,
        len(x),
        pool.stride(0),
        **sizes,
        PART=_PART,
        num_warps=_WARPS,
    )
    walk(writes=True)
