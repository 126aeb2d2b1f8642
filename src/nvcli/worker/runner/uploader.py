"""Uploader: brings small host arrays to the device, many in one copy, without waiting for the device.

A GPU's copy reads host memory later, when the stream gets there, so arrays are staged in a ring of pinned memory: it
holds the arrays of as many steps as may be in flight, plus two. `to_device` is for large, rare arrays.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

IntArray = np.ndarray
"""One-dimensional integers that fit int32."""

_ALIGN = 32  # int32 words: views start at 128 bytes, so that kernels see one alignment
_ARRAYS = 64
"""More arrays than a step uploads; each may be padded by up to _ALIGN words."""
_STEPS_BESIDE = 2


class Uploader:
    """Uploads the arrays of steps; `capacity` is the maximum total of int32 words per step."""

    def __init__(self, capacity: int, device: torch.device, *, steps_in_flight: int = 2) -> None:
        self._device = device
        if device.type == "cpu":
            return
        self._step_size = capacity + _ARRAYS * _ALIGN
        self._size = (steps_in_flight + _STEPS_BESIDE) * self._step_size
        self._pinned = torch.empty(self._size, dtype=torch.int32, pin_memory=True)
        self._staging = self._pinned.numpy()
        self._on_device = torch.empty(self._size, dtype=torch.int32, device=device)
        self._next = 0

    def __call__(self, *arrays: IntArray) -> tuple[Tensor, ...]:
        """Copy arrays to the device as int32 tensors, which stay valid until the step that uses them has finished."""
        if self._device.type == "cpu":
            return tuple(torch.from_numpy(array.astype(np.int32)) for array in arrays)
        padded = [-(-len(array) // _ALIGN) * _ALIGN for array in arrays]
        total = sum(padded)
        assert total <= self._step_size, "the step is larger than its message may be"
        if self._next + total > self._size:
            self._next = 0
        first = self._next
        self._next += total
        views, start = [], first
        for array, length in zip(arrays, padded, strict=True):
            self._staging[start : start + len(array)] = array
            views.append(self._on_device[start : start + len(array)])
            start += length
        self._on_device[first:start].copy_(self._pinned[first:start], non_blocking=True)
        return tuple(views)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array that may be too large for an `Uploader`, without waiting. The pinned-memory allocator keeps the
    host memory until the copy has finished."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
