"""MaskMemory: moves the masks that workers build to the device.

Masks are copied while the device computes the forward pass of the step that needs them, in one copy, which gets its own
stream unless it is small. A row that a worker is writing at that moment may arrive torn; the device reads it again from
host memory when it needs it (`take_late`).
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvcli.errors import WorkerError
from nvcli.kernels.late_masks import take_late_masks
from nvcli.worker.masks.mask_messages import masks_offset

_SMALL_BYTES = 256 << 10
"""The largest copy that takes the device no longer than the host needs to switch streams."""


class MaskMemory:
    """The masks of all rows, on the host and on the device."""

    def __init__(
        self, memory: mmap.mmap, num_rows: int, num_words: int, device: torch.device, *, num_logits: int
    ) -> None:
        """`memory` is laid out as in `mask_messages`. Raises WorkerError if the GPU driver rejects it."""
        offset, count = masks_offset(num_rows), num_rows * num_words
        made = torch.frombuffer(memory, dtype=torch.int32, count=count, offset=offset).view(num_rows, num_words)
        self._answered = torch.frombuffer(memory, dtype=torch.int64, count=num_rows)
        there, self._stream = made, None
        if device.type == "cuda":
            # The host would wait for copies from memory that is not pinned.
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            address = self._answered.data_ptr()
            status = int(cudart.cudaHostRegister(address, offset + made.nbytes, 0))
            if status:
                raise WorkerError(f"the mask memory of structured answers cannot be pinned: CUDA error {status}")
            weakref.finalize(self, cudart.cudaHostUnregister, address)
            there = torch.zeros_like(made, device=device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # The zeroing, and earlier uses of this memory, are queued on the current stream.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._made, self._there = made, there
        self._num_words = -(-num_logits // 32)

    @property
    def masks(self) -> Tensor:
        """[rows, W] int32 on the device: the masks that `bring` and `take_late` copied, sized for the model's
        logits."""
        return self._there[:, : self._num_words]

    def bring(self, rows: np.ndarray) -> None:
        """Copy the masks of rows [n] to the device, for work launched from now on.

        The device must have finished with the masks of the previous call.
        """
        if self._stream is None:
            return
        first, end = int(rows.min()), int(rows.max()) + 1
        if self._made[first:end].nbytes <= _SMALL_BYTES:
            self._there[first:end].copy_(self._made[first:end], non_blocking=True)
            return
        with torch.cuda.stream(self._stream):
            self._there[first:end].copy_(self._made[first:end], non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)

    def take_late(self, mask_of: Tensor, wanted: Tensor, patience: Tensor) -> Tensor:
        """Make the device wait for late masks (`take_late_masks`)."""
        return take_late_masks(self._there, self._made, self._answered, mask_of, wanted, patience)
