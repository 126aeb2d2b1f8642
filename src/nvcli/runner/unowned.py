"""Tensors over memory that somebody else manages."""

from __future__ import annotations

import torch
from torch import Tensor


class _DeviceMemory:
    """Describes a tensor's memory to torch without owning it."""

    def __init__(self, tensor: Tensor) -> None:
        bits = tensor.view(torch.int16) if tensor.element_size() == 2 else tensor.view(torch.int32)
        self.__cuda_array_interface__ = bits.__cuda_array_interface__


def unowned(tensor: Tensor) -> Tensor:
    """The same memory, not kept from the graphs that are captured next: they may use it, and none runs beside another.

    A large output of every graph, kept, would add up to more than all graphs together take otherwise.
    """
    return torch.as_tensor(_DeviceMemory(tensor), device=tensor.device).view(tensor.dtype)
