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

from torch import Tensor

from nvcli.kernels.triton.attention_launch import AttentionShape, LayerInputs
from nvcli.kernels.triton.hopper_launch import HopperLauncher
from nvcli.kernels.triton.hopper_prefill_kernel import ROWS, hopper_prefill_kernel
from nvcli.kernels.triton.multiprocessors import num_multiprocessors
from nvcli.kernels.triton.prefill_tiles import TileKey, TileList, TilePart


class HopperPrefillAttention:
    """Prefill attention of one geometry without windows; `PrefillAttention` describes the methods."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape, self._launcher = shape, HopperLauncher(shape)
        self._num_programs = num_multiprocessors(shape.device)

    @property
    def tile_key(self) -> TileKey:
        """What its tiles are."""
        return TileKey(self._shape.group, ROWS.value, is_sorted=True)

    def run(self, layer: LayerInputs, tiles: TileList, out: Tensor, log_sums: Tensor | None = None) -> None:
        """Attend the tiles, which are not of rests, as `PrefillAttention.run` does."""
        is_prefix = tiles.part is TilePart.PREFIX
        assert (log_sums is not None) == is_prefix
        assert out.is_contiguous()
        num_programs = min(self._shape.num_kv_heads * tiles.capacity, self._num_programs)
        sinks = out if layer.sinks is None else layer.sinks
        memory = out, layer.block_tables, tiles.items, tiles.num_items, sinks, log_sums
        has_sinks = layer.sinks is not None
        self._launcher.launch(hopper_prefill_kernel, num_programs, layer, memory, has_sinks, is_prefix)
