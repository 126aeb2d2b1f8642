"""MaskMemory: the masks that processes make for a rank, on their way to the device.

Masks go to the device while it computes the forward pass of the step that they are for, as one copy on a stream of
their own. A row that a process writes meanwhile arrives as anything; nobody uses it then.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from nvcli.runner.mask_messages import masks_offset


class MaskMemory:
    """The masks of all rows."""

    def __init__(self, memory: mmap.mmap, num_rows: int, num_words: int, device: torch.device) -> None:
        """`memory` is laid out as `mask_messages` says."""
        offset, count = masks_offset(num_rows), num_rows * num_words
        self._host = torch.frombuffer(memory, dtype=torch.int32, count=count, offset=offset).view(num_rows, num_words)
        self._there, self._stream = self._host, None
        if device.type == "cuda":
            # Copies from memory that the driver does not know would have the host wait.
            status = torch.cuda.cudart().cudaHostRegister(self._host.data_ptr(), self._host.nbytes, 0)  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(status))
            self._there = torch.zeros_like(self._host, device=device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def on_device(self, rows: np.ndarray, num_words: int, upload: Callable[[np.ndarray], tuple[Tensor, ...]]) -> Tensor:
        """Return the first `num_words` words of rows [n] int64: [n, num_words] int32 on the device.

        The device must be done with what an earlier call returned.
        """
        if self._stream is None:
            return self._host[torch.from_numpy(rows), :num_words]
        first, end = int(rows.min()), int(rows.max()) + 1
        with torch.cuda.stream(self._stream):
            self._there[first:end].copy_(self._host[first:end], non_blocking=True)
        (at,) = upload(rows)
        torch.cuda.current_stream().wait_stream(self._stream)
        return self._there[:, :num_words].index_select(0, at)
