"""MaskMemory: the masks that processes make for a rank, on their way to the device.

Masks go to the device while it computes the forward pass of the step that they are for, as one copy, which has a stream
of its own unless it is small. A row that a process writes meanwhile arrives as anything; nobody uses it then.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvcli.errors import WorkerError
from nvcli.runner.mask_messages import masks_offset

_SMALL_BYTES = 256 << 10
"""A copy that takes the device no longer than the host takes to change streams."""


class MaskMemory:
    """The masks of all rows."""

    def __init__(self, memory: mmap.mmap, num_rows: int, num_words: int, device: torch.device) -> None:
        """`memory` is laid out as `mask_messages` says. Raises WorkerError if a GPU's driver does not take it."""
        offset, count = masks_offset(num_rows), num_rows * num_words
        self._host = torch.frombuffer(memory, dtype=torch.int32, count=count, offset=offset).view(num_rows, num_words)
        self._there, self._stream = self._host, None
        if device.type == "cuda":
            # The host would wait for copies from memory that the driver does not know.
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            address = self._host.data_ptr()
            status = int(cudart.cudaHostRegister(address, self._host.nbytes, 0))
            if status:
                raise WorkerError(
                    f"the memory of the masks of structured answers cannot be pinned: CUDA error {status}"
                )
            weakref.finalize(self, cudart.cudaHostUnregister, address)
            self._there = torch.zeros_like(self._host, device=device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # The zeros, and what used this memory before, are behind the forward pass that is queued.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    @property
    def masks(self) -> Tensor:
        """[rows, num_words] int32 on the device, those that `bring` brought."""
        return self._there

    def bring(self, rows: np.ndarray) -> None:
        """Bring the masks of rows [n] to the device, for what is launched from now on.

        The device must be done with those of an earlier call.
        """
        if self._stream is None:
            return
        first, end = int(rows.min()), int(rows.max()) + 1
        if self._host[first:end].nbytes <= _SMALL_BYTES:
            self._there[first:end].copy_(self._host[first:end], non_blocking=True)
            return
        with torch.cuda.stream(self._stream):
            self._there[first:end].copy_(self._host[first:end], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)
