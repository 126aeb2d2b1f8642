"""The launch of the prefill kernel for Hopper GPUs (`hopper_prefill_kernel.py`).

It serves head sizes 64 and 128 in 16 bits, without windows, in blocks of a multiple of 64 tokens. Everything else, and
every other GPU, is for `prefill_attention.py` (`prefill_choice.py`).

Steps that are no CUDA graphs launch it once for each layer, so a launch must cost the host little. What does not change
from step to step is kept: the descriptors that tell TMA of a layer's cache, and what Triton compiled. A launch takes
the host 22 µs so, 57 where nothing is kept, and one of `prefill_attention.py` 27 (an H200 machine).

On an H200 a layer of 32 query heads and 8 KV heads of 128 in bfloat16 takes, in microseconds, against
`prefill_attention.py`: 1,799 against 2,696 for two prompts of 8,192 tokens, 3,857 against 5,497 for one of 16,384,
4,755 against 6,916 for 8,192 tokens that end at 24,576, 136 against 156 for 20 of 200 to 600, 97 against 98 for 150 of
50. With 16 query heads it takes 928 against 1,313, 1,679 against 2,684, 2,337 against 3,253, 74 against 82, and 58
against 55: nowhere much more. cuDNN takes 1,738 and 3,855 for the first two, from contiguous tensors of 32 KV heads.
Lists were then in the order of prompts (`prefill_tiles.py` says what sorting them is for).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.triton.hopper_cache import CacheDescriptors
from nvcli.kernels.triton.hopper_prefill_kernel import ROWS, hopper_prefill_kernel
from nvcli.kernels.triton.kept_kernel import KeptKernel
from nvcli.kernels.triton.prefill_tiles import TILE_FIELDS, TileKey, TileList, TilePart

_LOG2_E = 1.4426950408889634


class HopperPrefillAttention:
    """Prefill attention of one geometry without windows; `PrefillAttention` describes the methods."""

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, device: torch.device
    ) -> None:
        self._num_kv_heads, self._group = num_kv_heads, num_heads // num_kv_heads
        self._head_dim, self._block_size = head_dim, block_size
        self._num_programs = torch.cuda.get_device_properties(device).multi_processor_count
        self._descriptors = CacheDescriptors(num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
        self._kernels: dict[tuple[object, ...], KeptKernel] = {}

    @property
    def tile_key(self) -> TileKey:
        """What its tiles are."""
        return TileKey(self._group, ROWS.value, is_sorted=True)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        tiles: TileList,
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
        block_rows = self._descriptors.block_rows(k_cache)
        constants = (
            self._num_kv_heads,
            self._group,
            self._head_dim,
            self._block_size,
            block_rows,
            0.0 if soft_cap is None else soft_cap * _LOG2_E,
            sinks is not None,
            tiles.part is TilePart.PREFIX,
            TILE_FIELDS,
        )
        arguments = (
            q,
            self._descriptors.describe(k_cache),
            self._descriptors.describe(v_cache),
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
        )
        # Beside the constants these may differ between launches: whether addresses and strides are multiples of 16.
        # Caches and lists are aligned.
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in (q, out, sinks, log_sums))
        kind = q.dtype, q.stride(0) % 16, *(address % 16 for address in addresses), *constants
        kernel = self._kernels.get(kind)
        if kernel is None:
            kernel = self._kernels[kind] = KeptKernel(hopper_prefill_kernel, constants)
        kernel.launch(min(self._num_kv_heads * tiles.capacity, self._num_programs), *arguments)
