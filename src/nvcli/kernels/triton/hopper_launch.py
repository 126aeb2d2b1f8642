"""Launches of the attention kernels for Hopper GPUs: `hopper_prefill_kernel.py` and `hopper_segment_kernel.py`.

They serve head sizes 64 and 128 in 16 bits, without windows, in blocks of a multiple of 64 tokens, segments where the
cache is in the model's type. Everything else, and every other GPU, is for `prefill_attention.py` and
`segment_attention.py` (`prefill_choice.py`).

Steps that are no CUDA graphs launch one for each layer, so a launch must cost the host little. What does not change
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

from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nvcli.kernels.triton.attention_launch import AttentionShape, LayerInputs, check_layout
from nvcli.kernels.triton.descriptors import describe_kept
from nvcli.kernels.triton.hopper_prefill_kernel import KEYS, PART, ROWS, hopper_prefill_kernel
from nvcli.kernels.triton.hopper_segment_kernel import hopper_segment_kernel
from nvcli.kernels.triton.kept_kernel import KeptKernel
from nvcli.kernels.triton.multiprocessors import num_multiprocessors
from nvcli.kernels.triton.prefill_tiles import TileList, TilePart
from nvcli.kernels.triton.segment_work_list import SegmentWorkList

TILE_ROWS, TILE_KEYS = ROWS.value, KEYS.value
"""Rows and keys of the kernels' tiles."""


class HopperLauncher:
    """Launches the kernels over caches [num_blocks, block_size, KV, D] in 16 bits, with nothing but rows between blocks
    and one row for each token."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape, self._num_programs = shape, num_multiprocessors(shape.device)
        self._row_size = shape.num_kv_heads * shape.head_dim
        self._kernels: dict[tuple[object, ...], KeptKernel] = {}

    def attend_tiles(self, layer: LayerInputs, tiles: TileList, out: Tensor, log_sums: Tensor | None) -> None:
        """Attend tiles of chunks, which are not of rests, as `PrefillAttention.run` does."""
        assert out.is_contiguous()
        num_programs = min(self._shape.num_kv_heads * tiles.capacity, self._num_programs)
        sinks = out if layer.sinks is None else layer.sinks
        memory = out, layer.block_tables, tiles.items, tiles.num_items, sinks, log_sums
        constants = layer.sinks is not None, tiles.part is TilePart.PREFIX
        self._launch(hopper_prefill_kernel, num_programs, layer, memory, *constants)

    def attend_segments(
        self, layer: LayerInputs, work_list: SegmentWorkList, partial_out: Tensor, partial_lse: Tensor
    ) -> None:
        """Attend tiles of segments, as `SegmentAttention.run` does. The kernel that is launched next may run beside
        this one: it must wait for it before it ends, and must not read the results."""
        work = work_list.items, work_list.num_items, work_list.work, work_list.members, work_list.first_partials
        memory = layer.block_tables, *work, partial_out, partial_lse
        self._launch(hopper_segment_kernel, self._num_programs, layer, memory)

    def _launch(
        self, kernel: Any, num_programs: int, layer: LayerInputs, memory: tuple[Tensor | None, ...], *constants: object
    ) -> None:
        """Launch so many programs. The kernel takes its queries, the cache, `memory`, numbers of the layer and
        constants, of which `constants` are its own."""
        check_layout(self._shape, layer)
        assert layer.window is None
        block_rows, rest = divmod(layer.k_cache.stride(0), self._row_size)
        assert rest == 0
        shape = self._shape
        constants = (
            shape.num_kv_heads,
            shape.group,
            shape.head_dim,
            shape.block_size,
            block_rows,
            layer.soft_cap_log2,
            *constants,
        )
        # Beside the constants these may differ between launches: whether addresses and strides are multiples of 16.
        addresses = (0 if tensor is None else tensor.data_ptr() % 16 for tensor in (layer.q, *memory))
        kind = layer.q.dtype, layer.q.stride(0) % 16, *addresses, *constants
        kept = self._kernels.get(kind)
        if kept is None:
            kept = self._kernels[kind] = KeptKernel(kernel, constants)
        kept.launch(
            num_programs,
            layer.q,
            self._describe(layer.k_cache, block_rows),
            self._describe(layer.v_cache, block_rows),
            layer.v_cache,
            *memory,
            layer.scale_log2,
            layer.q.stride(0),
            layer.block_tables.stride(0),
        )

    def _describe(self, cache: Tensor, block_rows: int) -> TensorDescriptor:
        """Describe a cache for TMA as [rows, KV × D], of which a load brings 64 × 64."""
        num_rows = (len(cache) - 1) * block_rows + self._shape.block_size
        return describe_kept(cache, (PART.value, PART.value), view=((num_rows, self._row_size), (self._row_size, 1)))
