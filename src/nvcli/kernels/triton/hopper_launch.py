"""Launches of the attention kernels for Hopper GPUs. The descriptors that tell TMA where a layer's cache lies, and what
Triton compiled, are kept, as making or looking for them would cost the host more than the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nvcli.kernels.triton.attention_launch import AttentionShape, LayerInputs, check_layout
from nvcli.kernels.triton.hopper_prefill_kernel import PART
from nvcli.kernels.triton.kept_kernel import KeptKernel


class HopperLauncher:
    """Launches a kernel over caches [num_blocks, block_size, KV, D] in 16 bits, with nothing but rows between blocks
    and one row for each token."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._row_size = shape.num_kv_heads * shape.head_dim
        self._described: dict[tuple[int, int], TensorDescriptor] = {}
        self._kernels: dict[tuple[object, ...], KeptKernel] = {}

    def launch(
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
        """Describe a cache for TMA as [rows, KV × D], of which a load brings 64 × 64.

        A descriptor says where a cache lies and how large it is, and holds for whatever cache lies there. One that lies
        elsewhere gets its own.
        """
        num_rows = (len(cache) - 1) * block_rows + self._shape.block_size
        key = cache.data_ptr(), num_rows
        described = self._described.get(key)
        if described is None:
            layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
            part = [PART.value, PART.value]
            base = _Place(key[0], cache.dtype)
            described = TensorDescriptor(base, [num_rows, self._row_size], [self._row_size, 1], part, layout)
            self._described[key] = described
        return described


@dataclass(frozen=True, slots=True)
class _Place:
    """It stands for a tensor in a descriptor, which would else keep the memory of a cache that is gone."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address
