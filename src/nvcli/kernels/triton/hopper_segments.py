"""The launch of the kernel for shared segments on Hopper GPUs (`hopper_segment_kernel.py`).

It serves what `hopper_prefill.py` serves, over a cache in the model's type: heads of 64 and 128 in 16 bits, without
windows, in blocks of a multiple of 64 tokens. Everything else, and every other GPU, is for `segment_attention.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvcli.kernels.triton.decode_attention import LOG2_E
from nvcli.kernels.triton.hopper_cache import CacheDescriptors
from nvcli.kernels.triton.hopper_prefill_kernel import KEYS, ROWS
from nvcli.kernels.triton.hopper_segment_kernel import hopper_segment_kernel
from nvcli.kernels.triton.kept_kernel import KeptKernel
from nvcli.kernels.triton.segment_merge import SegmentResults
from nvcli.kernels.triton.segment_work_list import TILE_FIELDS, SegmentWorkList


class HopperSegmentAttention:
    """Decode attention over shared segments of one geometry; `SegmentAttention` describes the methods.

    The kernel that is launched after `run` may run beside this one's: it must wait for it before it ends, and must not
    read the results.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
    ) -> None:
        self._num_kv_heads, self._group = num_kv_heads, num_heads // num_kv_heads
        self._head_dim, self._block_size = head_dim, block_size
        self._max_rows, self._device = max_rows, device
        self._descriptors = CacheDescriptors(num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
        self._kernels: dict[tuple[object, ...], KeptKernel] = {}
        shape = (self.work_list(None).max_partials, num_kv_heads, self._group)
        self._partial_out = torch.empty(*shape, head_dim, dtype=dtype, device=device)
        self._partial_lse = torch.empty(*shape, dtype=torch.float32, device=device)

    def work_list(self, window: int | None) -> SegmentWorkList:
        """Make a work list for this geometry; `window` is None. Chunks begin with a block and with a tile of keys."""
        assert window is None
        return SegmentWorkList(
            window=None,
            num_kv_heads=self._num_kv_heads,
            keys=math.lcm(KEYS.value, self._block_size),
            tile_rows=ROWS.value // self._group,
            max_rows=self._max_rows,
            device=self._device,
        )

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        work_list: SegmentWorkList,
        slots: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
    ) -> SegmentResults:
        """Attend the rows to their segments, as `SegmentAttention.run` does; `window` is None."""
        assert window is None
        assert q.stride()[1:] == (self._head_dim, 1)
        assert k_cache.stride() == v_cache.stride()
        constants = (
            self._num_kv_heads,
            self._group,
            self._head_dim,
            self._block_size,
            self._descriptors.block_rows(k_cache),
            0.0 if soft_cap is None else soft_cap * LOG2_E,
            TILE_FIELDS,
        )
        arguments = (
            q,
            self._descriptors.describe(k_cache),
            self._descriptors.describe(v_cache),
            v_cache,
            block_tables,
            work_list.items,
            work_list.num_items,
            work_list.work,
            work_list.members,
            work_list.first_partials,
            self._partial_out,
            self._partial_lse,
            scale * LOG2_E,
            q.stride(0),
            block_tables.stride(0),
        )
        # As in `hopper_prefill.py`; of the tensors, q alone may not be aligned.
        kind = q.dtype, q.stride(0) % 16, q.data_ptr() % 16, *constants
        kernel = self._kernels.get(kind)
        if kernel is None:
            kernel = self._kernels[kind] = KeptKernel(hopper_segment_kernel, constants)
        kernel.launch(work_list.num_processors, *arguments)
        return SegmentResults(
            out=self._partial_out,
            lse=self._partial_lse,
            firsts=work_list.first_partials[0],
            counts=work_list.num_partials,
        )
