"""PinnedUpload: bytes of files to a GPU through one small pinned buffer.

A GPU copies from pinned memory at the full speed of its link. Files are read into the buffer, not mapped: their pages
are then copied once, by the system, and no page of them is ever part of this process.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

_BUFFER_BYTES = 16 << 20


class PinnedUpload:
    """Reads parts of files. For use by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._view = self._buffer.numpy().data
        self._fds: dict[Path, int] = {}

    def read(self, file: Path, offset: int, num_bytes: int) -> Tensor:
        """Read bytes of a file: → [num_bytes] uint8 on the GPU. Raises OSError, also if the file ends before."""
        if file not in self._fds:
            self._fds[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        for start in range(0, num_bytes, _BUFFER_BYTES):
            size = min(_BUFFER_BYTES, num_bytes - start)
            filled = 0
            while filled < size:
                count = os.preadv(self._fds[file], [self._view[filled:size]], offset + start + filled)
                if count == 0:
                    raise OSError(f"it ends at byte {offset + start + filled:,}")
                filled += count
            data[start : start + size].copy_(self._buffer[:size])  # returns when the buffer may be filled anew
        return data

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._fds:
            os.close(self._fds.popitem()[1])
