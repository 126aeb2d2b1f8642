"""Copies between host and device that wait for neither.

A GPU's copy reads host memory later, when the stream gets there, so arrays are staged in rings of pinned memory, which
hold those of as many steps as may be in flight, plus two. `Uploader` takes many small arrays in one copy; `PinnedRing`
has buffers for one; `SlotNumbers` are kept on the device; `to_device` is for large, rare arrays.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from nvcli.kernels.lora import spread_adapters
from nvcli.kernels.step_tensors import StepRows
from nvcli.kernels.whole_numbers import round_up

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
        padded = [round_up(len(array), _ALIGN) for array in arrays]
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


class PinnedRing:
    """Host buffers for copies that a GPU makes later, when its stream gets there: each is reused after as many others
    as steps may be in flight, plus two."""

    def __init__(
        self, size: int, device: torch.device, *, steps_in_flight: int, dtype: torch.dtype = torch.int32
    ) -> None:
        is_pinned, count = device.type == "cuda", steps_in_flight + _STEPS_BESIDE
        self._buffers = [torch.zeros(size, dtype=dtype, pin_memory=is_pinned) for _ in range(count)]

    @property
    def latest(self) -> Tensor:
        """The buffer that `next` returned last."""
        return self._buffers[0]

    def next(self) -> Tensor:
        """Return the buffer that was used longest ago."""
        self._buffers = self._buffers[1:] + self._buffers[:1]
        return self.latest


class SlotNumbers:
    """A number for each slot, on the device, from which tokens get that of their slot."""

    def __init__(
        self, num_slots: int, max_tokens: int, upload: Uploader, device: torch.device, *, unset: int = 0
    ) -> None:
        """`unset`: the number of a slot that was given none."""
        self._upload = upload
        self.of_slots = torch.full((num_slots,), unset, dtype=torch.int32, device=device)
        self._on_host = np.full(num_slots, unset, dtype=np.int32)
        """A copy, so that only changes are uploaded."""
        self._of_tokens = torch.full((max_tokens,), unset, dtype=torch.int32, device=device)

    def set(self, numbers: Mapping[int, int]) -> None:
        """Set the numbers of some slots."""
        changed = {slot: number for slot, number in numbers.items() if number != self._on_host[slot]}
        if changed:
            slots, values = np.array(list(changed)), np.array(list(changed.values()))
            self._on_host[slots] = values
            on_device, uploaded = self._upload(slots, values)
            self.of_slots[on_device.long()] = uploaded

    def of_tokens(self, rows: StepRows, num_tokens: int) -> Tensor:
        """Return the number of each token's slot, [T] int32, valid until the next call. Can run in a CUDA graph."""
        of_tokens = self._of_tokens[:num_tokens]
        spread_adapters(self.of_slots, rows.slots, rows.query_start_loc, of_tokens)
        return of_tokens


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array that may be too large for an `Uploader`, without waiting. The pinned-memory allocator keeps the
    host memory until the copy has finished."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
