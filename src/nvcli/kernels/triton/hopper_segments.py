"""The launch of the kernel for shared segments on Hopper GPUs (`hopper_segment_kernel.py`).

It serves what `hopper_prefill.py` serves, over a cache in the model's type: heads of 64 and 128 in 16 bits, without
windows, in blocks of a multiple of 64 tokens. Everything else, and every other GPU, is for `segment_attention.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvcli.kernels.triton.attention_launch import AttentionShape, LayerInputs
from nvcli.kernels.triton.hopper_launch import HopperLauncher
from nvcli.kernels.triton.hopper_prefill_kernel import KEYS, ROWS
from nvcli.kernels.triton.hopper_segment_kernel import hopper_segment_kernel
from nvcli.kernels.triton.segment_merge import SegmentResults
from nvcli.kernels.triton.segment_work_list import SegmentWorkList


class HopperSegmentAttention:
    """Decode attention over shared segments of one geometry; `SegmentAttention` describes the methods.

    The kernel that is launched after `run` may run beside this one's: it must wait for it before it ends, and must not
    read the results.
    """

    def __init__(self, shape: AttentionShape, *, max_rows: int) -> None:
        self._shape, self._launcher, self._max_rows = shape, HopperLauncher(shape), max_rows
        partials = (self.work_list(None).max_partials, shape.num_kv_heads, shape.group)
        self._partial_out = torch.empty(*partials, shape.head_dim, dtype=shape.dtype, device=shape.device)
        self._partial_lse = torch.empty(partials, dtype=torch.float32, device=shape.device)

    def work_list(self, window: int | None) -> SegmentWorkList:
        """Make a work list for this geometry; `window` is None. Chunks begin with a block and with a tile of keys."""
        assert window is None
        return SegmentWorkList(
            window=None,
            num_kv_heads=self._shape.num_kv_heads,
            keys=math.lcm(KEYS.value, self._shape.block_size),
            tile_rows=ROWS.value // self._shape.group,
            max_rows=self._max_rows,
            device=self._shape.device,
        )

    def run(self, layer: LayerInputs, work_list: SegmentWorkList, slots: Tensor, seq_lens: Tensor) -> SegmentResults:
        """Attend the rows to their segments, as `SegmentAttention.run` does."""
        memory = (
            layer.block_tables,
            work_list.items,
            work_list.num_items,
            work_list.work,
            work_list.members,
            work_list.first_partials,
            self._partial_out,
            self._partial_lse,
        )
        self._launcher.launch(hopper_segment_kernel, work_list.num_processors, layer, memory)
        return SegmentResults(self._partial_out, self._partial_lse, work_list.first_partials[0], work_list.num_partials)
