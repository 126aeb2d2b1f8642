"""The launch of paged attention kernels: the shape of heads and cache, a layer's inputs, and the arguments that every
attention kernel takes, whatever its work list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvcli.kernels.distance_bias import DistanceBias
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.triton.attention.attention_fold import LOG2_E, AttentionKind, Tile
from nvcli.kernels.triton.launch.kept_kernel import KeptKernel
from nvcli.kernels.triton.launch.triton_version import can_load_ahead
from nvcli.kernels.whole_numbers import next_power_of_2


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One geometry of heads, and the cache that holds their keys."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens of a block."""
    dtype: torch.dtype
    """The model's type."""
    kv_dtype: torch.dtype
    """The cache's type."""
    device: torch.device
    tail_dim: int = 0
    """Numbers of queries and keys behind the first `head_dim`."""
    has_values: bool = True
    """Whether values lie apart, each at the beginning of a place as large as a key's; otherwise they are the first
    `head_dim` numbers of their keys."""
    has_bias: bool = False
    """Whether queries add numbers to scores (`LayerInputs.bias`)."""
    shared_column: int = 0
    """The place in a token's row of the cache of the last 64 numbers of all heads' keys; heads are then as far from
    each other as the cache's strides say. 0: each head has its own."""

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def tile_dim(self) -> int:
        """The head size by which tiles are chosen: of keys with tails, and values beside them, the next power of 2."""
        return next_power_of_2(self.head_dim + self.tail_dim) if self.has_values else self.head_dim

    @property
    def is_fp8(self) -> bool:
        """Whether the cache is in FP8."""
        return self.kv_dtype == FP8


class LayerInputs(NamedTuple):
    """The queries, cache and softmax parameters of one layer."""

    q: Tensor
    """[tokens, H, D and the tail]; tokens may be strided."""
    k_cache: Tensor
    """[num_blocks, block_size, KV, D and the tail]."""
    v_cache: Tensor
    """[num_blocks, block_size, KV, D, or the places for D and the tail], with the strides of `k_cache`."""
    block_tables: Tensor
    """[slots, ...] int32, of the layer's KV group."""
    scale: float
    """The positive factor of scores."""
    window: int | None = None
    """The most keys that a token sees up to its own, and from its own on; None: all."""
    soft_cap: float | None = None
    sinks: Tensor | None = None
    """[H] float32, a score for each head that belongs to no key."""
    bias: DistanceBias | None = None
    """Numbers that are added to scores; not every kernel takes them."""
    both_ways: bool = False
    """Whether the tokens of chunks see those after them, too; only `prefill_attention.py` takes it."""

    @property
    def bias_extent(self) -> int:
        """The distances at which there are such numbers; 0: there are none."""
        return 0 if self.bias is None else self.bias.values.shape[2]

    @property
    def scale_log2(self) -> float:
        """The scale times log2(e), for a softmax in powers of 2."""
        return self.scale * LOG2_E


class AttentionLauncher:
    """Launches attention kernels for layers whose heads have one shape.

    A step outside CUDA graphs launches one kernel for each layer, so a launch must cost the host little. Whatever stays
    the same from step to step is kept: constants, TMA descriptors of the layers' caches, and compiled kernels.

    by_tma: the tokens and columns that a TMA load of the cache brings; None: kernels read it by address. With TMA, the
    distance between blocks must be a whole number of tokens.
    is_invariant: see `AttentionKind`.
    has_gaps: other numbers may lie between the keys of tokens; kernels go by `AttentionKind.row_size`.
    """

    def __init__(
        self, shape: AttentionShape, *, by_tma: int | None = None, is_invariant: bool = False, has_gaps: bool = False
    ) -> None:
        self.shape = shape
        self._by_tma, self._is_invariant, self._has_gaps = by_tma, is_invariant, has_gaps
        self._kernels: dict[tuple[object, ...], KeptKernel] = {}
        self._descriptors: dict[tuple[int, ...], Any] = {}

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        layer: LayerInputs,
        memory: tuple[Tensor | None, ...],
        tile: Tile | None,
        *constants: object,
        **options: object,
    ) -> None:
        """Launch a kernel. Its arguments are the layer's tensors, `memory`, the layer's numbers, its kind, `tile`
        unless None, and `constants`. `options` go to Triton, and follow from the kernel and its constants."""
        q, k_cache, v_cache = layer.q, layer.k_cache, layer.v_cache
        caches: tuple[Any, ...] = k_cache, v_cache
        if self._by_tma is not None:
            caches = self._describe(k_cache), self._describe(v_cache)
            memory = v_cache, *memory
        tensors = layer.block_tables, q if layer.sinks is None else layer.sinks, *memory
        # Triton compiles anew for what is a multiple of 16 and what is not.
        addresses = [None if one is None else one.data_ptr() % 16 for one in (q, k_cache, v_cache, *tensors)]
        strides = q.stride(), k_cache.stride(), v_cache.stride()
        kind = layer.window is None, layer.soft_cap, layer.sinks is None, layer.bias_extent, layer.both_ways
        key = kernel, tile, constants, kind, q.dtype, *strides, *addresses
        kept = self._kernels.get(key)
        if kept is None:
            if tile is not None:
                constants = tile, *constants
                options |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
            kept = self._kernels[key] = KeptKernel(kernel, (self._kind(layer), *constants), **options)
        kept.launch(
            grid, q, *caches, *tensors, layer.window or 0, layer.scale_log2, strides[0][0], layer.block_tables.stride(0)
        )

    def _kind(self, layer: LayerInputs) -> AttentionKind:
        """Check that heads are laid out as kernels read them, and return the layer's kind."""
        shape, strides = self.shape, layer.k_cache.stride()
        key_dim, has_shared = shape.head_dim + shape.tail_dim, shape.shared_column > 0
        row_size = strides[1] if has_shared else shape.num_kv_heads * key_dim
        assert layer.q.stride()[1:] == (key_dim, 1)
        assert strides == layer.v_cache.stride()
        assert has_shared or self._has_gaps or strides[1:] == (row_size, key_dim, 1)
        assert not has_shared or self._by_tma is not None
        assert self._by_tma is None or (layer.window is None and strides[0] % row_size == 0)
        assert layer.bias is None or (layer.soft_cap is None and layer.bias.values.is_contiguous())
        return AttentionKind(
            num_kv_heads=shape.num_kv_heads,
            group=shape.group,
            head_dim=shape.head_dim,
            tail_dim=shape.tail_dim,
            has_values=shape.has_values,
            block_size=shape.block_size,
            block_stride=strides[0],
            has_window=layer.window is not None,
            soft_cap=0.0 if layer.soft_cap is None else layer.soft_cap * LOG2_E,
            has_sinks=layer.sinks is not None,
            bias_extent=layer.bias_extent,
            is_both_ways=layer.both_ways,
            is_invariant=self._is_invariant,
            loads_ahead=_loads_ahead(shape.device),
            on_gpu=layer.q.is_cuda,
            row_size=strides[1],
            head_stride=strides[2],
            shared_column=shape.shared_column,
        )

    def _describe(self, cache: Tensor) -> Any:
        """Return the TMA descriptor of a cache as [rows, KV × D]; each load brings a square."""
        key = cache.data_ptr(), len(cache), cache.stride(0)
        descriptor = self._descriptors.get(key)
        if descriptor is None:
            from nvcli.kernels.triton.launch.descriptors import describe_kept

            assert self._by_tma is not None
            row_size = cache.stride(1)
            num_rows = (len(cache) - 1) * (cache.stride(0) // row_size) + self.shape.block_size
            view = (num_rows, row_size), (row_size, 1)
            descriptor = self._descriptors[key] = describe_kept(cache, (self._by_tma, self._by_tma), view=view)
        return descriptor


def _loads_ahead(device: torch.device) -> bool:
    return device.type != "cuda" or can_load_ahead(torch.cuda.get_device_capability(device))
