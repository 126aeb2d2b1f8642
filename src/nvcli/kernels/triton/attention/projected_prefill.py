"""Prefill attention of latents with keys and values of each head, for Hopper GPUs: the latents that a step's chunks see
are projected to a scratch, one layer at a time, and the kernel of `hopper_prefill_kernel.py` attends to it.

A query that is absorbed is compared with 576 numbers of a key and collects 512; as it is projected, with 192 and 128 in
DeepSeek-V3: a third of the operations, but each latent must be projected in every step that sees it.
`attention/projected_latents.py` says which steps gain.

On an H200 a layer of 16 heads of 192 and 128 takes, in microseconds with the projection, against absorbed queries
without their products: 615 (projection 104) against 3,683 for 8,192 tokens, 1,698 (206) against 11,428 for as many
behind 8,192 others, 202 (108) against 338 for 20 prompts of 400. With 20 heads of 256 it takes 1,272 (156) against
4,562, 3,590 (301) against 14,275, and 369 (176) against 413.

A token's row of the scratch has the keys and values of all heads as the projection gives them, without the rotated
numbers, and behind them the rotated numbers that all heads share. The scratch is divided into units of 64 tokens, as in
`prefill_scratch.py`, which plans them. Here all keys of a step must find room.

Shapes: N heads, L size of a latent, R rotated numbers, C = N × (plain numbers of a key + size of a value).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.attention.attention_launch import AttentionShape, LayerInputs
from nvcli.kernels.triton.attention.fp8_kv import scale_pointers
from nvcli.kernels.triton.attention.prefill_attention import PrefillAttention, PrefillKind
from nvcli.kernels.triton.attention.prefill_scratch import UNIT, ScratchTiles
from nvcli.kernels.triton.attention.prefill_tiles import PrefillTiles, TileKey
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors
from nvcli.kernels.whole_numbers import ceil_div

SHARED_DIM = 64
"""The rotated numbers of a key."""
_ROWS, _COLUMNS, _DEPTH = 128, 128, 64
"""The tile of the projection: tokens, columns, and numbers of a latent at a time."""


@triton.jit(do_not_specialize=["block_table_stride"], do_not_specialize_on_alignment=["block_tables"])
def project_latents_kernel(
    cache,  # [num_blocks, BLOCK_SIZE, 1, CACHE_ROW], blocks BLOCK_STRIDE apart, or as `fp8_kv.py` says
    weight,  # [COLUMNS, LATENT], contiguous
    scratch,  # [units, UNIT, COLUMNS + SHARED], written
    block_tables,  # [slots, ...] int32, rows block_table_stride apart
    units,  # [units, 2] int32: the slot whose keys a unit holds, and which unit of them
    num_units,  # [1] int32
    block_table_stride,
    LATENT: tl.constexpr,
    SHARED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    CACHE_ROW: tl.constexpr,  # LATENT + SHARED, or more
    ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Programs take tiles of tokens and columns in turn, those of the same tokens one after the other."""
    IS_FP8: tl.constexpr = cache.dtype.element_ty == tl.float8e4nv
    COLUMN_TILES: tl.constexpr = (COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    WIDTH: tl.constexpr = COLUMNS + SHARED
    lanes = tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    shared = tl.arange(0, SHARED)
    num_rows = tl.load(num_units) * UNIT
    for item in range(tl.program_id(0), tl.cdiv(num_rows, ROWS) * COLUMN_TILES, tl.num_programs(0)):
        row = item // COLUMN_TILES * ROWS + lanes
        inside = row < num_rows
        unit = row // UNIT
        slot = tl.load(units + unit * 2, mask=inside, other=0).to(tl.int64)
        token = tl.load(units + unit * 2 + 1, mask=inside, other=0) * UNIT + row % UNIT
        block = tl.load(block_tables + slot * block_table_stride + token // BLOCK_SIZE, mask=inside, other=0)
        source = cache + block.to(tl.int64) * BLOCK_STRIDE + token % BLOCK_SIZE * CACHE_ROW
        target = scratch + row.to(tl.int64) * WIDTH
        column = item % COLUMN_TILES * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        is_column = column < COLUMNS
        latents = source[:, None] + depth[None, :]
        weights = weight + column[None, :] * LATENT + depth[:, None]
        acc = tl.zeros([ROWS, TILE_COLUMNS], tl.float32)
        for start in range(0, LATENT, DEPTH):
            latent = tl.load(latents + start)
            if IS_FP8:
                latent = latent.to(weight.dtype.element_ty)
            one = tl.load(weights + start, mask=is_column[None, :], other=0.0)
            acc = tl.dot(latent, one, acc, input_precision="ieee")
        if IS_FP8:  # the product of codes and weights is exact enough before it
            scales = scale_pointers(
                cache, block.to(tl.int64), token % BLOCK_SIZE, 0, 1, LATENT + SHARED, BLOCK_SIZE, BLOCK_STRIDE
            )
            scale = tl.load(scales, mask=inside, other=0.0).to(tl.float32)
            acc = acc * scale[:, None]
        places = target[:, None] + column[None, :]
        tl.store(places, acc.to(scratch.dtype.element_ty), mask=inside[:, None] & is_column[None, :])
        if item % COLUMN_TILES == 0:
            rotated = tl.load(source[:, None] + (LATENT + shared)[None, :])
            if IS_FP8:
                rotated = rotated.to(tl.float32) * scale[:, None]
            tl.store(
                target[:, None] + (COLUMNS + shared)[None, :],
                rotated.to(scratch.dtype.element_ty),
                mask=inside[:, None],
            )


class ProjectedHeads(NamedTuple):
    """The heads of latent attention as they are projected."""

    num_heads: int
    key_dim: int
    """Numbers of a head's query and key, of which the last 64 are rotated."""
    value_dim: int

    @property
    def stride(self) -> int:
        """Numbers that a latent is projected to for each head: those of a key that are not rotated, and the value."""
        return self.key_dim - SHARED_DIM + self.value_dim

    @property
    def columns(self) -> int:
        """Numbers that a latent is projected to."""
        return self.num_heads * self.stride

    @property
    def row_size(self) -> int:
        """Numbers of a token's row in the scratch."""
        return self.columns + SHARED_DIM


class ProjectedPrefill:
    """Prefill attention of one kind of latents, without windows, to a scratch of `scratch_tokens`, a multiple of 64.
    Plan `tiles` each step, then call `run` in each layer; both may be captured in a CUDA graph."""

    def __init__(self, shape: AttentionShape, heads: ProjectedHeads, *, scratch_tokens: int) -> None:
        """`shape`: that of the absorbed queries and of the cache."""
        assert shape.block_size % UNIT.value == 0
        self._shape, self._heads = shape, heads
        self._num_units: int = scratch_tokens // UNIT.value
        # Zeros, not empty: a masked value is multiplied by 0, and 0 × NaN is NaN. A descriptor of the values, which
        # begin behind the first head's key, ends as far behind the last row.
        size = (self._num_units * UNIT.value + 1) * heads.row_size
        memory = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        sizes = self._num_units, UNIT.value, heads.num_heads, heads.value_dim
        strides = UNIT.value * heads.row_size, heads.row_size, heads.stride, 1
        self._k = memory.as_strided(sizes, strides)
        self._v = memory.as_strided(sizes, strides, heads.key_dim - SHARED_DIM)
        self._block_table = torch.arange(self._num_units, dtype=torch.int32, device=shape.device)
        self._attention = PrefillAttention(
            AttentionShape(
                num_heads=heads.num_heads,
                num_kv_heads=heads.num_heads,
                head_dim=heads.value_dim,
                tail_dim=heads.key_dim - heads.value_dim,
                shared_column=heads.columns,
                block_size=UNIT.value,
                dtype=shape.dtype,
                kv_dtype=shape.dtype,
                device=shape.device,
            ),
            PrefillKind.HOPPER,
        )

    @property
    def tile_key(self) -> TileKey:
        """The key of its tile lists, which are `ScratchTiles`."""
        return self._attention.tile_key._replace(scratch_units=self._num_units)

    @property
    def num_units(self) -> int:
        """The units of 64 tokens that find room in the scratch."""
        return self._num_units

    def run(self, layer: LayerInputs, weight: Tensor, tiles: PrefillTiles, out: Tensor) -> None:
        """Attend the chunks. `layer.q`: [T, N, size of a key], rotated; the cache has the latents and rotated keys.
        weight: [C, L], contiguous; out: [T, N, size of a value], contiguous."""
        assert isinstance(tiles, ScratchTiles)
        assert weight.is_contiguous()
        heads, tables, cache = self._heads, layer.block_tables, layer.k_cache
        most = ceil_div(self._num_units * UNIT.value, _ROWS) * ceil_div(heads.columns, _COLUMNS)
        project_latents_kernel[(min(most, 2 * num_multiprocessors(self._shape.device)),)](
            cache,
            weight,
            self._k,
            tables,
            tiles.units,
            tiles.num_units,
            tables.stride(0),
            LATENT=weight.shape[1],
            SHARED=SHARED_DIM,
            COLUMNS=heads.columns,
            BLOCK_SIZE=self._shape.block_size,
            BLOCK_STRIDE=cache.stride(0),
            CACHE_ROW=cache.stride(1),
            ROWS=_ROWS,
            TILE_COLUMNS=_COLUMNS,
            DEPTH=_DEPTH,
            num_warps=8,
            num_stages=3,
        )
        projected = layer._replace(k_cache=self._k, v_cache=self._v, block_tables=self._block_table)
        self._attention.run(projected, tiles.copied, out)
