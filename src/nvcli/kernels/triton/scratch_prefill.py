"""Prefill attention over an FP8 cache on Hopper GPUs: each layer copies the keys and values that its chunks see to a
scratch in 16 bits (`prefill_scratch.py`), and the kernel for Hopper (`hopper_prefill.py`) attends to the copies.

Chunks whose keys find no room in the scratch are attended by `prefill_attention.py`, which reads the cache itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.triton.hopper_prefill import HopperPrefillAttention
from nvcli.kernels.triton.prefill_attention import PrefillAttention
from nvcli.kernels.triton.prefill_scratch import UNIT, PrefillScratch, ScratchTiles
from nvcli.kernels.triton.prefill_tiles import PrefillTiles, TileKey


class ScratchPrefillAttention:
    """Prefill attention of one geometry without windows over an FP8 cache; `PrefillAttention` describes the methods.

    scratch_tokens: keys that the scratch has room for, a multiple of 64; dtype: the model's, in which it keeps them.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        scratch_tokens: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._num_units = scratch_tokens // UNIT
        self._scratch = PrefillScratch(
            num_units=self._num_units, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, device=device
        )
        self._copies = HopperPrefillAttention(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=UNIT, device=device
        )
        self._rest = PrefillAttention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
        )
        assert self._copies.tile_key[:2] == self._rest.tile_key[:2], "they share tiles"

    @property
    def tile_key(self) -> TileKey:
        """What its tiles are, which are `ScratchTiles`."""
        return self._copies.tile_key._replace(scratch_units=self._num_units)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        tiles: PrefillTiles,
        out: Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend the tiles, as `PrefillAttention.run` does; `window` is None, and `tiles` are `ScratchTiles`."""
        assert isinstance(tiles, ScratchTiles)
        scratch = self._scratch
        scratch.fill(k_cache, v_cache, block_tables, tiles)
        self._copies.run(
            q,
            scratch.k,
            scratch.v,
            scratch.block_table,
            tiles.copied,
            out,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
        )
        self._rest.run(
            q,
            k_cache,
            v_cache,
            block_tables,
            tiles,
            out,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
        )
