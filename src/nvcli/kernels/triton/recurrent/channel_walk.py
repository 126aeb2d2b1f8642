"""The selective scan of Mamba-1 for the tokens of prompts, in Triton. Each number of a state decays by itself, so there
are no products of matrices: a program has the states of some channels in registers, and walks through a row's tokens.
It reads several tokens at a time, so that the states do not wait for each of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.recurrent_types import ChannelGates, RecurrentHeads
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.recurrent.gates import LOG2_E, read_step_sizes
from nvcli.kernels.triton.recurrent.state_rows import RowTensors, row_of
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_TILE, _TOKENS, _WARPS = 32, 4, 1
"""Channels of a program, the tokens that it reads at a time, and its warps: with one, no sum over a channel's state
waits for other warps, and with as many channels as threads a step size is computed once."""


@triton.jit(do_not_specialize=["first_row", "num_rows", "num_tokens"])
def _scan_kernel(
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
    KEY_TILE: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Program (row - first_row, tile of channels). KEY_TILE is the next power of two of KEY_DIM."""
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    row = tl.program_id(0) + first_row
    start, end, before, source = row_of(row, rows, BLOCK_SIZE)
    i = tl.arange(0, KEY_TILE)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_key, in_value = i < KEY_DIM, j < VALUE_DIM
    inside = in_value[:, None] & in_key[None, :]
    places = i[None, :] * VALUE_DIM + j[:, None]
    state = tl.load(pool_ptr + source * pool_stride + places, mask=inside & (source > 0), other=0.0)
    log_rates = tl.load(gates.log_rate + j[:, None] * KEY_DIM + i[None, :], mask=inside, other=0.0).to(tl.float32)
    rates = -tl.exp(log_rates) * LOG2_E
    bias = tl.load(gates.step_bias + j, mask=in_value, other=0.0).to(tl.float32)
    skip = tl.load(gates.skip + j, mask=in_value, other=0.0).to(tl.float32)
    first = start
    while first < end:
        # The tokens of one block, at whose end the state is stored.
        last = tl.minimum(end, first + BLOCK_SIZE - (before + first - start) % BLOCK_SIZE)
        for some in range(0, last - first, TOKENS):
            values = ()
            steps = ()
            keys = ()
            queries = ()
            for number in tl.static_range(TOKENS):
                token = first.to(tl.int64) + some + number
                is_value, is_key = in_value & (token < last), in_key & (token < last)
                key_place = token * key_stride + i
                value = tl.load(x_ptr + token * x_stride + j, mask=is_value, other=0.0).to(tl.float32)
                values += (value,)  # type: ignore[assignment]
                step = read_step_sizes(gates.step + token * step_stride, j, is_value, bias)
                steps += (step,)  # type: ignore[assignment]
                key = tl.load(gates.keys + key_place, mask=is_key, other=0.0).to(tl.float32)
                keys += (key,)  # type: ignore[assignment]
                query = tl.load(gates.queries + key_place, mask=is_key, other=0.0).to(tl.float32)
                queries += (query,)  # type: ignore[assignment]
            for number in tl.static_range(TOKENS):
                token = first.to(tl.int64) + some + number
                # Behind the block a step's size is 0: such tokens write nothing and decay nothing.
                state *= tl.exp2(rates * steps[number][:, None])
                state += (steps[number] * values[number])[:, None] * keys[number][None, :]
                out = tl.sum(state * queries[number][None, :], 1) + skip * values[number]
                mask = in_value & (token < last)
                tl.store(out_ptr + token * VALUE_DIM + j, out.to(out_ptr.dtype.element_ty), mask=mask)
        target = tl.load(rows.places + last - 1) // BLOCK_SIZE
        tl.store(pool_ptr + target * pool_stride + places, state, mask=inside & (target > 0))
        first = last
    if row == num_rows - 1:
        # Tokens after the last row.
        nothing = tl.zeros([TILE], out_ptr.dtype.element_ty)
        for number in range(num_tokens - end):
            tl.store(out_ptr + (end.to(tl.int64) + number) * VALUE_DIM + j, nothing, mask=in_value)


def compute_chunks(
    x: Tensor, gates: ChannelGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, out: Tensor
) -> None:
    """Compute the rows after the decode rows into `out`, as `nvcli.kernels.channel_scan.channel_scan` does, with zeros
    for tokens after the last row."""
    num_rows, first_row = len(rows.slots), rows.num_decode_rows
    _scan_kernel[num_rows - first_row, ceil_div(heads.value_dim, _TILE)](
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
        KEY_TILE=next_power_of_2(heads.key_dim),
        TILE=_TILE,
        TOKENS=_TOKENS,
        num_warps=_WARPS,
    )
