"""Uploader: small host arrays to the device, many in one copy, without waiting for the device.

A GPU's copy reads the host memory later, when the stream gets there, so arrays are staged in pinned memory that is used
round and round: it holds the arrays of several steps, and the engine keeps no more than two in flight.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

IntArray = np.ndarray
"""One dimension of integers that fit int32."""

_ALIGN = 32  # int32 words: views start at 128 bytes, so that kernels see one alignment
_ARRAYS = 64
"""More than a step uploads; each may be padded by _ALIGN words."""
_STEPS_HELD = 4


class Uploader:
    """`capacity`: most int32 words of all the arrays of a step."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._device = device
        if device.type == "cpu":
            return
        self._size = _STEPS_HELD * (capacity + _ARRAYS * _ALIGN)
        self._pinned = torch.empty(self._size, dtype=torch.int32, pin_memory=True)
        self._staging = self._pinned.numpy()
        self._on_device = torch.empty(self._size, dtype=torch.int32, device=device)
        self._next = 0

    def __call__(self, *arrays: IntArray) -> tuple[Tensor, ...]:
        """int32 tensors on the device, valid until some steps later."""
        if self._device.type == "cpu":
            return tuple(torch.from_numpy(array.astype(np.int32)) for array in arrays)
        padded = [-(-len(array) // _ALIGN) * _ALIGN for array in arrays]
        total = sum(padded)
        assert total <= self._size // _STEPS_HELD, "the step is larger than its message may be"
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
