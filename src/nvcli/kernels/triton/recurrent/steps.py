"""Decode rows of recurrent layers in Triton, by any rule. For a row of one token, each program updates some columns
of one head's state in a single pass. For a row with drafts, it first adds what is pending to the stored state; then it
computes one token after another, and stores none of their states. All other rows are computed in chunks
(`delta_chunks.py`, `channel_chunks.py`, `scan_chunks.py`, `channel_walk.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.kept_inputs import KeptInputs
from nvcli.kernels.recurrent_types import ChannelGates, DeltaGates, RecurrentHeads, ScanGates
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.triton.recurrent.advance_states import add_pending
from nvcli.kernels.triton.recurrent.delta_chunks import NORM_EPS
from nvcli.kernels.triton.recurrent.gates import read_beta, read_decays, read_gates, read_rates, read_step_sizes
from nvcli.kernels.triton.recurrent.state_rows import RowTensors, row_of
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_STEP_TILE, _STEP_WARPS = 64, 4
"""Measured on an H200 with 256 rows of 32 heads of 128: 280 µs, with states read and written at 3.84 TB/s; 327 with
tiles of 32, 281 with tiles of 128 and 4 warps. Cache hints make it slower (282 to 290)."""
_SHORT_KEYS, _WIDE_STEP_TILE = 16, 128
"""The tile for keys so short, as Mamba-1 has them. With 8,192 channels an H200 takes 83 µs for 256 rows and 17 for 64;
109 and 22 with tiles of 64, 94 and 19 with tiles of 256."""
_DRAFT_TILE, _DRAFT_WARPS = 32, 1
"""Measured on an H200 with 256 rows of 3 tokens, 2 tokens pending and 32 heads of 128: 390 µs, where a row of one token
takes 280; 409 with 2 warps, 457 with tiles of 64 and 4 warps, 605 with tiles of 16 and 1 warp. With 16 rows of 4
tokens: 32 µs; 33.5, 41 and 38. Loads of which fewer wait for each other, and dependent launches: 388 µs."""


@triton.jit
def _read_rates(gates, i, j, inside, HEADS: tl.constexpr):
    """Return the `rates` of columns `j` of a state [i, j] in a scan by channels; 0 outside, and by another rule."""
    rates = 0.0
    if HEADS.rule == "channel scan":
        rates = tl.where(inside, read_rates(gates, i[:, None], j[None, :], inside, HEADS.key_dim), 0.0)
    return rates


@triton.jit
def _key_ptr(qkv_ptr, gates, token, beta_stride, HEADS: tl.constexpr):
    """Return where a token's keys begin."""
    if HEADS.rule == "channel scan":
        return gates.keys + token * beta_stride
    return qkv_ptr + HEADS.num_key_heads * HEADS.key_dim


@triton.jit
def _add_token(state, token, head, i, j, rates, qkv_ptr, gates, beta_stride, step_stride, HEADS: tl.constexpr):
    """Add one token (int64), whose queries, keys and values (by channels: values alone) begin at `qkv_ptr`, to columns
    `j` of one head's state [i, j]. Returns the state, the token's result, what it wrote, and the logarithm of the decay
    that it applied, or those of rows `i`, or the step sizes of columns `j`."""
    KEY_HEADS: tl.constexpr = HEADS.num_key_heads
    VALUE_HEADS: tl.constexpr = HEADS.num_value_heads
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    RULE: tl.constexpr = HEADS.rule
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    in_key, in_value = i < KEY_DIM, j < VALUE_DIM
    key_ptr = _key_ptr(qkv_ptr, gates, token, beta_stride, HEADS)
    if RULE == "channel scan":
        query_ptr, value_ptr = gates.queries + token * beta_stride, qkv_ptr
    else:
        query_ptr, value_ptr = qkv_ptr, qkv_ptr + 2 * KEY_HEADS * KEY_DIM
    q = tl.load(query_ptr + key_head * KEY_DIM + i, mask=in_key, other=0.0).to(tl.float32)
    k = tl.load(key_ptr + key_head * KEY_DIM + i, mask=in_key, other=0.0).to(tl.float32)
    v = tl.load(value_ptr + head * VALUE_DIM + j, mask=in_value, other=0.0).to(tl.float32)
    if RULE == "channel scan":
        bias = tl.load(gates.step_bias + j, mask=in_value, other=0.0).to(tl.float32)
        factor = read_step_sizes(gates.step + token * step_stride, j, in_value, bias)
        decay = factor
        state *= tl.exp(rates * factor[None, :])
    elif HEADS.decays_by_channel:
        factor = read_beta(gates, token, head, True, beta_stride, HEADS.beta_scale)
        decay = read_decays(gates, token, head, i, in_key, step_stride, HEADS)
        state *= tl.exp(decay)[:, None]
    else:
        factor, decay = read_gates(gates, token, head, True, beta_stride, step_stride, RULE, HEADS.beta_scale)
        state *= tl.exp(decay)
    if RULE == "delta":
        q *= tl.rsqrt(tl.sum(q * q, 0) + NORM_EPS) * KEY_DIM**-0.5
        k *= tl.rsqrt(tl.sum(k * k, 0) + NORM_EPS)
        written = (v - tl.sum(state * k[:, None], 0)) * factor
        state += k[:, None] * written[None, :]
        out = tl.sum(state * q[:, None], 0)
    else:
        written = v * factor
        state += k[:, None] * written[None, :]
        if RULE == "channel scan":
            skip = tl.load(gates.skip + j, mask=in_value, other=0.0)
        else:
            skip = tl.load(gates.skip + head)
        out = tl.sum(state * q[:, None], 0) + v * skip.to(tl.float32)
    return state, out, written, decay


@triton.jit
def _decode_kernel(
    qkv_ptr,  # [T, NUM_CHANNELS]
    gates,  # `DeltaGates`, `ScanGates` or `ChannelGates`, rows beta_stride (by channels: of keys) and step_stride apart
    pool_ptr,  # [num_blocks, VALUE_HEADS, KEY_DIM, VALUE_DIM] float32, blocks pool_stride apart, read and written
    out_ptr,  # [T, VALUE_HEADS, VALUE_DIM], written
    kept,  # `KeptInputs` of the layer; all but its inputs are read and written. None, and so the next two: no drafts
    rows,  # `RowTensors`
    pending,  # `PendingTokens`
    num_tokens,  # that a step can keep
    qkv_stride,
    beta_stride,
    step_stride,
    pool_stride,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # `RecurrentHeads`
    VALUE_TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row, value head, tile of the state's columns), for a row of one token, or with drafts."""
    KEY_HEADS: tl.constexpr = HEADS.num_key_heads
    VALUE_HEADS: tl.constexpr = HEADS.num_value_heads
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    HEADS_OF_KEY: tl.constexpr = VALUE_HEADS // KEY_HEADS
    await_kernel_before(DEPENDENT)
    row = tl.program_id(0)
    head = tl.program_id(1)
    start, end, _, source = row_of(row, rows, BLOCK_SIZE)
    if kept is not None:
        earlier = tl.load(pending.earlier + row)
        behind = tl.load(pending.targets + earlier, mask=earlier >= 0, other=0)
        is_behind = behind > 0
        source = tl.where(is_behind, tl.load(pending.sources + earlier, mask=is_behind, other=0), source)
        first = tl.load(pending.starts + earlier, mask=is_behind, other=0).to(tl.int64)
        count = tl.load(pending.counts + earlier, mask=is_behind, other=0)
    i = tl.arange(0, triton.next_power_of_2(KEY_DIM))
    j = tl.program_id(2) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    in_key, in_value = i < KEY_DIM, j < VALUE_DIM
    inside = in_key[:, None] & in_value[None, :]
    values = head * VALUE_DIM + j
    places = head * KEY_DIM * VALUE_DIM + i[:, None] * VALUE_DIM + j[None, :]
    state = tl.load(pool_ptr + source * pool_stride + places, mask=inside & (source > 0), other=0.0)
    rates = _read_rates(gates, i, j, inside, HEADS)
    if kept is None:
        token = start.to(tl.int64)
        token_ptr = qkv_ptr + token * qkv_stride
        state, out, _, _ = _add_token(
            state, token, head, i, j, rates, token_ptr, gates, beta_stride, step_stride, HEADS
        )
        tl.store(out_ptr + token * VALUE_HEADS * VALUE_DIM + values, out.to(out_ptr.dtype.element_ty), mask=in_value)
        target = tl.load(rows.places + token) // BLOCK_SIZE
        tl.store(pool_ptr + target * pool_stride + places, state, mask=inside & (target > 0))
    else:
        state = add_pending(state, first, count, head, i, j, rates, kept, HEADS)
        if HEADS.rule == "channel scan":
            tl.store(kept.rates + i[:, None] * VALUE_DIM + j[None, :], rates, mask=inside & (row == 0))
        tl.store(pool_ptr + behind * pool_stride + places, state, mask=inside & is_behind)
        own = tl.load(pending.turn).to(tl.int64) * num_tokens
        keeps_head = tl.program_id(2) == 0
        keeps_key = keeps_head & (head % HEADS_OF_KEY == 0)
        for index in range(end - start):
            token = start.to(tl.int64) + index
            token_ptr = qkv_ptr + token * qkv_stride
            state, out, written, decay = _add_token(
                state, token, head, i, j, rates, token_ptr, gates, beta_stride, step_stride, HEADS
            )
            key_ptr = _key_ptr(token_ptr, gates, token, beta_stride, HEADS)
            out_ptrs = out_ptr + token * VALUE_HEADS * VALUE_DIM + values
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_value)
            token += own
            tl.store(kept.written + token * VALUE_HEADS * VALUE_DIM + values, written, mask=in_value)
            if HEADS.rule == "channel scan":
                tl.store(kept.decay + token * VALUE_HEADS * VALUE_DIM + values, decay, mask=in_value)
            elif HEADS.decays_by_channel:
                decay_ptrs = kept.decay + (token * VALUE_HEADS + head) * KEY_DIM + i
                tl.store(decay_ptrs, decay, mask=in_key & keeps_head)
            else:
                tl.store(kept.decay + token * VALUE_HEADS + head, decay, mask=keeps_head)
            key = (head // HEADS_OF_KEY) * KEY_DIM + i
            k = tl.load(key_ptr + key, mask=in_key & keeps_key, other=0.0)
            tl.store(kept.keys + token * KEY_HEADS * KEY_DIM + key, k, mask=in_key & keeps_key)


def compute_decode_rows(
    qkv: Tensor,
    gates: DeltaGates | ScanGates | ChannelGates,
    pool: Tensor,
    rows: StateRows,
    heads: RecurrentHeads,
    kept: KeptInputs | None,
) -> Tensor:
    """Compute the leading rows, of one token or with drafts, as `nvcli.kernels.recurrence.compute_rows` does. Return
    its result, in which those of the rows behind them are undefined yet."""
    assert pool[0].is_contiguous()
    if isinstance(gates, ChannelGates):
        beta = gates.keys
        assert gates.queries.stride() == beta.stride()
        assert gates.log_rate.is_contiguous()
    else:
        beta = gates.beta if isinstance(gates, DeltaGates) else gates.step
    assert qkv.stride(1) == beta.stride(1) == gates.step.stride(1) == 1
    strides = qkv.stride(0), beta.stride(0), gates.step.stride(0), pool.stride(0)
    out = torch.empty(len(qkv), heads.num_value_heads, heads.value_dim, dtype=qkv.dtype, device=qkv.device)
    if rows.num_decode_rows:
        has_drafts = rows.num_draft_rows > 0
        assert not has_drafts or (kept is not None and rows.pending is not None)
        usual_tile = _WIDE_STEP_TILE if heads.key_dim <= _SHORT_KEYS else _STEP_TILE
        tile = min(_DRAFT_TILE if has_drafts else usual_tile, next_power_of_2(heads.value_dim))
        _decode_kernel[rows.num_decode_rows, heads.num_value_heads, ceil_div(heads.value_dim, tile)](
            qkv,
            gates,
            pool,
            out,
            kept if has_drafts else None,
            RowTensors.of(rows),
            rows.pending if has_drafts else None,
            len(kept.inputs) if kept is not None and has_drafts else None,
            *strides,
            BLOCK_SIZE=rows.block_size,
            HEADS=heads,
            VALUE_TILE=tile,
            **({"DEPENDENT": False} if has_drafts else dependent(qkv.device)),
            num_warps=_DRAFT_WARPS if has_drafts else _STEP_WARPS,
        )
    return out
