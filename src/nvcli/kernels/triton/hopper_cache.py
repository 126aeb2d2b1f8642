"""The descriptors that tell TMA where a layer's cache lies, for the kernels for Hopper GPUs. They are kept, as making
them for each launch would cost the host more than the launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nvcli.kernels.triton.hopper_prefill_kernel import PART


class CacheDescriptors:
    """The descriptors of caches [num_blocks, block_size, KV, D] in 16 bits, with nothing but rows between blocks."""

    def __init__(self, *, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        self._row_size, self._head_dim, self._block_size = num_kv_heads * head_dim, head_dim, block_size
        self._described: dict[tuple[int, int], TensorDescriptor] = {}

    def block_rows(self, cache: Tensor) -> int:
        """Return how many rows, one for each token, lie from one block to the next."""
        assert cache.stride()[1:] == (self._row_size, self._head_dim, 1)
        block_rows, rest = divmod(cache.stride(0), self._row_size)
        assert rest == 0
        return block_rows

    def describe(self, cache: Tensor) -> TensorDescriptor:
        """Describe a cache for TMA as [rows, KV × D], of which a load brings 64 × 64.

        A descriptor says where a cache lies and how large it is, and holds for whatever cache lies there. One that lies
        elsewhere gets its own.
        """
        num_rows = (len(cache) - 1) * self.block_rows(cache) + self._block_size
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
