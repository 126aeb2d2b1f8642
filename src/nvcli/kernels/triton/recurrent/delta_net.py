"""The gated delta rule in Triton. For a row of one token, each program updates some columns of one head's state in a
single pass; rows of more tokens are computed in chunks (`delta_chunks.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.delta_types import DeltaGates, DeltaHeads
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.triton.recurrent.delta_chunks import NORM_EPS, compute_chunks, read_gates
from nvcli.kernels.triton.recurrent.state_rows import RowTensors, row_of
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_STEP_TILE, _STEP_WARPS = 64, 4
"""Measured on an H200 with 256 rows of 32 heads of 128: 280 µs, in which states are read and written at 3.84 TB/s; with
tiles of 32 327, with 128 and 4 warps 281. Hints to the caches make it slower (282 to 290)."""


@triton.jit
def _step_kernel(
    qkv_ptr,  # [T, NUM_CHANNELS]
    gates,  # `DeltaGates`, rows beta_stride and step_stride apart
    pool_ptr,  # [num_blocks, VALUE_HEADS, KEY_DIM, VALUE_DIM] float32, blocks pool_stride apart, read and written
    out_ptr,  # [T, VALUE_HEADS, VALUE_DIM], written
    rows,  # `RowTensors`
    qkv_stride,
    beta_stride,
    step_stride,
    pool_stride,
    scale,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # `DeltaHeads`
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row, value head, tile of the state's columns). KEY_TILE is the next power of two of KEY_DIM."""
    KEY_HEADS: tl.constexpr = HEADS.num_key_heads
    VALUE_HEADS: tl.constexpr = HEADS.num_value_heads
    KEY_DIM: tl.constexpr = HEADS.key_dim
    VALUE_DIM: tl.constexpr = HEADS.value_dim
    await_kernel_before(DEPENDENT)
    row = tl.program_id(0)
    head = tl.program_id(1)
    token, _, _, source = row_of(row, rows, BLOCK_SIZE)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    i = tl.arange(0, KEY_TILE)
    j = tl.program_id(2) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    in_key, in_value = i < KEY_DIM, j < VALUE_DIM
    qkv_ptr += token.to(tl.int64) * qkv_stride
    q = tl.load(qkv_ptr + key_head * KEY_DIM + i, mask=in_key, other=0.0).to(tl.float32)
    k = tl.load(qkv_ptr + (KEY_HEADS + key_head) * KEY_DIM + i, mask=in_key, other=0.0).to(tl.float32)
    v = tl.load(qkv_ptr + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + j, mask=in_value, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + NORM_EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + NORM_EPS)
    beta, decay = read_gates(gates, token.to(tl.int64), head, True, beta_stride, step_stride)
    places = head * KEY_DIM * VALUE_DIM + i[:, None] * VALUE_DIM + j[None, :]
    inside = in_key[:, None] & in_value[None, :]
    state = tl.load(pool_ptr + source * pool_stride + places, mask=inside & (source > 0), other=0.0) * tl.exp(decay)
    written = (v - tl.sum(state * k[:, None], 0)) * beta
    state += k[:, None] * written[None, :]
    out = tl.sum(state * q[:, None], 0)
    out_ptr += (token.to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM
    tl.store(out_ptr + j, out.to(out_ptr.dtype.element_ty), mask=in_value)
    target = tl.load(rows.places + token) // BLOCK_SIZE
    tl.store(pool_ptr + target * pool_stride + places, state, mask=inside & (target > 0))


def delta_rule(qkv: Tensor, gates: DeltaGates, pool: Tensor, rows: StateRows, heads: DeltaHeads) -> Tensor:
    """See `nvcli.kernels.delta_net.delta_rule`."""
    assert qkv.stride(1) == gates.beta.stride(1) == gates.step.stride(1) == 1
    assert pool[0].is_contiguous()
    num_rows, num_single = len(rows.slots), rows.num_single_rows
    shape = (len(qkv), heads.num_value_heads, heads.value_dim)
    out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    if num_single:
        tile = min(_STEP_TILE, next_power_of_2(heads.value_dim))
        _step_kernel[num_single, heads.num_value_heads, ceil_div(heads.value_dim, tile)](
            qkv,
            gates,
            pool,
            out,
            RowTensors.of(rows),
            qkv.stride(0),
            gates.beta.stride(0),
            gates.step.stride(0),
            pool.stride(0),
            heads.key_dim**-0.5,
            BLOCK_SIZE=rows.block_size,
            HEADS=heads,
            KEY_TILE=next_power_of_2(heads.key_dim),
            VALUE_TILE=tile,
            **dependent(qkv.device),
            num_warps=_STEP_WARPS,
        )
    if num_rows > num_single:
        compute_chunks(qkv, gates, pool, rows, heads, out)
    return out
