"""MaskMemory: moves the masks that workers build to the device.

Masks are copied while the device computes the forward pass of the step that needs them, in one copy, which gets its own
stream unless it is small. A row that a worker is writing at that moment may arrive torn; the device reads it again from
host memory when it needs it (`take_late`).
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvcli.errors import WorkerError
from nvcli.kernels.late_masks import take_late_masks
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.worker.masks.mask_messages import MaskTable

_SMALL_BYTES = 256 << 10
"""The largest copy that takes the device no longer than the host needs to switch streams."""


class MaskMemory:
    """The masks of all rows, on the host and on the device."""

    def __init__(self, table: MaskTable, device: torch.device, *, num_logits: int) -> None:
        """Raises WorkerError if the GPU driver rejects the table's memory."""
        made = torch.from_numpy(table.masks.view(np.int32))
        self._answered = torch.from_numpy(table.numbers)
        there, self._stream = made, None
        if device.type == "cuda":
            # The host would wait for copies from memory that is not pinned.
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            address = self._answered.data_ptr()  # the memory begins with these, and ends with the masks
            status = int(cudart.cudaHostRegister(address, made.data_ptr() + made.nbytes - address, 0))
            if status:
                raise WorkerError(f"the mask memory of structured answers cannot be pinned: CUDA error {status}")
            weakref.finalize(self, cudart.cudaHostUnregister, address)
            there = torch.zeros_like(made, device=device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # The zeroing, and earlier uses of this memory, are queued on the current stream.
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._made, self._there = made, there
        self._num_words = ceil_div(num_logits, 32)

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
