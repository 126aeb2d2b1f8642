"""The descriptors that tell TMA where a tensor lies, for the kernels for Hopper GPUs, and the room for its tiles.

Those of weights and caches are kept, as making one for each launch would cost the host more than the launch. They say
where a tensor lies and how large it is, hold for whatever lies there, and do not keep its memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TILE_BYTES = 226 << 10
"""The shared memory that a program has for tiles: the most on a Hopper GPU, less what barriers take."""

Sizes = tuple[int, ...]


def describe(tensor: Tensor, tile: Sizes, *, swizzle_bytes: int = 128) -> TensorDescriptor:
    """Describe a tensor whose tiles of that shape a kernel copies to or from shared memory, in lines of this many
    bytes."""
    layout = _layout(swizzle_bytes, tensor.element_size(), len(tile))
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(tile), layout)


def describe_kept(
    tensor: Tensor, tile: Sizes, *, view: tuple[Sizes, Sizes] | None = None, swizzle_bytes: int = 128
) -> TensorDescriptor:
    """Do what `describe` does for a tensor that stays where it is; or for a view of it, of another shape and with other
    strides."""
    shape, strides = view or (tensor.shape, tensor.stride())
    return _describe_address(tensor.data_ptr(), tensor.dtype, shape, strides, tile, swizzle_bytes)


@lru_cache(maxsize=8192)
def _describe_address(
    address: int, dtype: torch.dtype, shape: Sizes, strides: Sizes, tile: Sizes, swizzle_bytes: int
) -> TensorDescriptor:
    layout = _layout(swizzle_bytes, dtype.itemsize, len(tile))
    return TensorDescriptor(_Place(address, dtype), list(shape), list(strides), list(tile), layout)


@lru_cache(maxsize=64)
def _layout(swizzle_bytes: int, element_bytes: int, rank: int) -> NVMMASharedLayout:
    return NVMMASharedLayout(swizzle_byte_width=swizzle_bytes, element_bitwidth=8 * element_bytes, rank=rank)


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor's place in a descriptor, which would otherwise keep the tensor's memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address
