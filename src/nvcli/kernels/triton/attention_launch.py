"""What launches of paged attention share: the shape of the heads and their cache, what a layer attends to, and the
arguments that all kernels take, whichever work list they follow."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.triton.attention_fold import LOG2_E, AttentionKind, Tile
from nvcli.kernels.triton.triton_version import can_load_ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One geometry of heads, and the cache in which their keys are."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens of a block."""
    dtype: torch.dtype
    """The model's."""
    kv_dtype: torch.dtype
    """The cache's."""
    device: torch.device

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_fp8(self) -> bool:
        """Whether the cache is in FP8."""
        return self.kv_dtype == FP8

    @property
    def shared_memory(self) -> int:
        """KiB of a program: 227 on data-centre Hopper and Blackwell, 163 on the A100, 99 on the rest."""
        capability = torch.cuda.get_device_capability(self.device)
        return 227 if capability[0] in (9, 10) else 163 if capability == (8, 0) else 99


class LayerInputs(NamedTuple):
    """What one layer attends to, and how."""

    q: Tensor
    """[tokens, H, D]; tokens may be strided."""
    k_cache: Tensor
    """[num_blocks, block_size, KV, D]."""
    v_cache: Tensor
    """Likewise."""
    block_tables: Tensor
    """[slots, ...] int32, of the layer's KV group."""
    scale: float
    """Of scores; positive."""
    window: int | None = None
    """Keys that a token sees at most."""
    soft_cap: float | None = None
    sinks: Tensor | None = None
    """[H] float32, scores that belong to no key."""

    @property
    def scale_log2(self) -> float:
        """The scale in powers of 2."""
        return self.scale * LOG2_E

    @property
    def soft_cap_log2(self) -> float:
        """The soft cap in powers of 2; 0: none."""
        return 0.0 if self.soft_cap is None else self.soft_cap * LOG2_E


def check_layout(shape: AttentionShape, layer: LayerInputs) -> None:
    """Assert that heads lie as kernels read them."""
    assert layer.q.stride()[1:] == (shape.head_dim, 1)
    assert layer.k_cache.stride() == layer.v_cache.stride()
    assert layer.k_cache.stride()[1:] == (shape.num_kv_heads * shape.head_dim, shape.head_dim, 1)


@lru_cache(maxsize=64)
def _loads_ahead(device: torch.device) -> bool:
    return device.type != "cuda" or can_load_ahead(torch.cuda.get_device_capability(device))


def launch_attention(
    kernel: Any,
    grid: tuple[int, ...],
    shape: AttentionShape,
    layer: LayerInputs,
    tile: Tile,
    *memory: Tensor | None,
    is_invariant: bool = False,
    **options: Any,
) -> None:
    """Launch a kernel, which takes the layer's tensors, `memory`, the layer's numbers and what it is compiled for.
    `options`: constants of its own, and how Triton launches it."""
    check_layout(shape, layer)
    kind = AttentionKind(
        num_kv_heads=shape.num_kv_heads,
        group=shape.group,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        block_stride=layer.k_cache.stride(0),
        has_window=layer.window is not None,
        soft_cap=layer.soft_cap_log2,
        has_sinks=layer.sinks is not None,
        is_invariant=is_invariant,
        loads_ahead=_loads_ahead(shape.device),
        on_gpu=layer.q.is_cuda,
    )
    kernel[grid](
        layer.q,
        layer.k_cache,
        layer.v_cache,
        layer.block_tables,
        layer.q if layer.sinks is None else layer.sinks,
        *memory,
        layer.window or 0,
        layer.scale_log2,
        layer.q.stride(0),
        layer.block_tables.stride(0),
        KIND=kind,
        TILE=tile,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **options,
    )
