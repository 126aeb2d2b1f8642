"""The launch of the prefill kernel for Hopper GPUs (`hopper_prefill_kernel.py`).

It serves head sizes 64 and 128 in 16 bits, without windows, in blocks of a multiple of 64 tokens. Everything else, and
every other GPU, is for `prefill_attention.py` (`prefill_choice.py`).

A launch costs the host 95 µs, as TMA is told of the cache in each, and one of `prefill_attention.py` 32. Steps that are
no CUDA graphs launch it once for each layer.

On an H200 a layer of 32 query heads and 8 KV heads of 128 in bfloat16 takes, in microseconds, against
`prefill_attention.py`: 1,799 against 2,696 for two prompts of 8,192 tokens, 3,857 against 5,497 for one of 16,384,
4,755 against 6,916 for 8,192 tokens that end at 24,576, 136 against 156 for 20 of 200 to 600, 97 against 98 for 150 of
50. With 16 query heads it takes 928 against 1,313, 1,679 against 2,684, 2,337 against 3,253, 74 against 82, and 58
against 55: nowhere much more. cuDNN takes 1,738 and 3,855 for the first two, from contiguous tensors of 32 KV heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nvcli.kernels.triton.hopper_prefill_kernel import PART, ROWS, hopper_prefill_kernel
from nvcli.kernels.triton.prefill_tiles import TILE_FIELDS, PrefillTiles, TilePart

_LOG2_E = 1.4426950408889634


class HopperPrefillAttention:
    """Prefill attention of one geometry without windows; `PrefillAttention` describes the methods."""

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, device: torch.device
    ) -> None:
        self._num_kv_heads, self._group = num_kv_heads, num_heads // num_kv_heads
        self._head_dim, self._block_size = head_dim, block_size
        self._num_programs = torch.cuda.get_device_properties(device).multi_processor_count

    @property
    def tile_key(self) -> tuple[int, int]:
        """(query heads for each KV head, rows of a tile)."""
        return self._group, ROWS.value

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
        log_sums: Tensor | None = None,
    ) -> None:
        """Attend the tiles, which are not of rests, as `PrefillAttention.run` does; `window` is None."""
        assert window is None
        assert (log_sums is not None) == (tiles.part is TilePart.PREFIX)
        assert q.stride()[1:] == (self._head_dim, 1)
        assert out.is_contiguous()
        assert k_cache.stride() == v_cache.stride()
        row_size = self._num_kv_heads * self._head_dim
        assert k_cache.stride()[1:] == (row_size, self._head_dim, 1)
        block_rows, rest = divmod(k_cache.stride(0), row_size)
        assert rest == 0
        num_rows = (len(k_cache) - 1) * block_rows + self._block_size
        grid = (min(self._num_kv_heads * tiles.capacity, self._num_programs),)
        hopper_prefill_kernel[grid](
            q,
            _describe(k_cache, num_rows, row_size),
            _describe(v_cache, num_rows, row_size),
            v_cache,
            out,
            block_tables,
            tiles.tiles,
            tiles.num_tiles,
            out if sinks is None else sinks,
            log_sums,
            scale * _LOG2_E,
            q.stride(0),
            block_tables.stride(0),
            NUM_KV_HEADS=self._num_kv_heads,
            GROUP=self._group,
            HEAD_DIM=self._head_dim,
            BLOCK_SIZE=self._block_size,
            BLOCK_ROWS=block_rows,
            SOFT_CAP=0.0 if soft_cap is None else soft_cap * _LOG2_E,
            HAS_SINKS=sinks is not None,
            IS_PREFIX=tiles.part is TilePart.PREFIX,
            TILE_FIELDS=TILE_FIELDS,
            num_warps=4,
        )


def _describe(cache: Tensor, num_rows: int, row_size: int) -> TensorDescriptor:
    """Describe a cache for TMA as [num_rows, row_size], of which a load brings 64 × 64."""
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(cache, [num_rows, row_size], [row_size, 1], [PART.value, PART.value], layout)
