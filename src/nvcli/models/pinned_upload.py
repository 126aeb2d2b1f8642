"""PinnedUpload: bytes of files to a GPU through one small pinned buffer.

A GPU copies from pinned memory at the full speed of its link. Files are read into the buffer, not mapped: their pages
are then copied once, by the system, and no page of them is ever part of this process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
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
        return self.read_parts(((file, offset),), num_bytes)

    def read_parts(self, places: Sequence[tuple[Path, int]], num_bytes: int) -> Tensor:
        """Read as many bytes at each of these places (file, offset), one part after the other: → [places × num_bytes]
        uint8 on the GPU. Small parts are copied together: the GPU is waited for once per filled buffer.

        Raises OSError, also if a file ends before.
        """
        data = torch.empty(len(places) * num_bytes, dtype=torch.uint8, device=self._device)
        copied = filled = 0
        for file, offset in places:
            done = 0
            while done < num_bytes:
                if filled == _BUFFER_BYTES:
                    copied, filled = self._copy(data, copied, filled), 0
                size = min(_BUFFER_BYTES - filled, num_bytes - done)
                count = os.preadv(self._open(file), [self._view[filled : filled + size]], offset + done)
                if count == 0:
                    raise OSError(f"it ends at byte {offset + done:,}")
                done, filled = done + count, filled + count
        self._copy(data, copied, filled)
        return data

    def _copy(self, data: Tensor, first: int, size: int) -> int:
        """Copy the buffer's first bytes to their place, and return the place after it."""
        data[first : first + size].copy_(self._buffer[:size])  # returns when the buffer may be filled anew
        return first + size

    def _open(self, file: Path) -> int:
        if file not in self._fds:
            self._fds[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[file]

    def close(self) -> None:
        """Close the files. Idempotent."""
        while self._fds:
            os.close(self._fds.popitem()[1])
