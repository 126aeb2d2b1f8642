"""PinnedUpload: bytes of files to a GPU through one small pinned buffer.

A GPU copies from pinned memory at the full speed of its link. Files are read into the buffer, not mapped: their pages
are then copied once, by the system, and no page of them is ever part of this process. What is known to be needed is
staged: read in the order of the files, in as few calls as possible. A call for each small tensor costs more than its
bytes, most of all where threads wait for each other to be told that theirs has returned.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from nvcli.kernels.whole_numbers import round_up
from nvcli.models.tensor_info import FileRange

_BUFFER_BYTES = 16 << 20
_LARGEST_GAP = 64 << 10
"""Bytes between two ranges that are read too, rather than calling twice."""
_UNIT = 16
"""Bytes to a multiple of which staged bytes keep their distance in the file, so that numbers stay aligned."""


class PinnedUpload:
    """Reads parts of files. For use by one thread at a time, on the stream that is current there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._view = self._buffer.numpy().data
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """A stream of its own for whoever reads; None on a CPU."""
        self._fds: dict[Path, int] = {}
        self._staged: Tensor | None = None
        self._ranges: dict[Path, list[FileRange]] = {}
        """The parts of each file that are staged, in order."""
        self._places: dict[Path, list[int]] = {}
        """The first byte in `_staged` of each range."""
        self._num_filled = 0

    def stage(self, ranges: Iterable[FileRange]) -> None:
        """Read parts of files to the GPU, from where they are taken when they are asked for. What was staged before is
        forgotten. Raises OSError, also if a file ends before."""
        self.forget_staged()
        num_bytes = 0
        for part in _joined(ranges):
            self._ranges.setdefault(part.file, []).append(part)
            self._places.setdefault(part.file, []).append(num_bytes)
            num_bytes += round_up(part.end - part.begin, _UNIT)
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        copied = 0
        for file, parts in self._ranges.items():
            for part in parts:
                copied = self._read_part(data, copied, file, part.begin, part.end - part.begin)
                copied = self._skip(data, copied, -(part.end - part.begin) % _UNIT)
        self._copy(data, copied)
        self._staged = data

    def forget_staged(self) -> None:
        """Forget what was staged. Idempotent."""
        self._staged = None
        self._ranges.clear()
        self._places.clear()

    def read(self, file: Path, offset: int, num_bytes: int) -> Tensor:
        """Read bytes of a file: → [num_bytes] uint8 on the GPU, possibly a view of what was staged. Raises OSError,
        also if the file ends before."""
        return self.read_parts([FileRange(file, offset, offset + num_bytes)])

    def read_parts(self, parts: Sequence[FileRange]) -> Tensor:
        """Read equally long parts of files, one after the other: → [parts × length] uint8 on the GPU, as `read` does.
        Small parts are copied together: the GPU is waited for once per filled buffer.

        Raises OSError, also if a file ends before.
        """
        num_bytes = parts[0].end - parts[0].begin
        if self._staged is not None and (places := self._find(parts)) is not None:
            return _gather(self._staged, places, num_bytes)
        data = torch.empty(len(parts) * num_bytes, dtype=torch.uint8, device=self._device)
        copied = 0
        for part in parts:
            copied = self._read_part(data, copied, part.file, part.begin, num_bytes)
        self._copy(data, copied)
        return data

    def _find(self, parts: Iterable[FileRange]) -> list[int] | None:
        """Return where parts of files are staged; None: not all of them are."""
        found: list[int] = []
        within, distance = FileRange(Path(), 0, 0), 0
        for part in parts:
            file, begin, end = part
            if begin < within.begin or end > within.end or file is not within.file:
                ranges = self._ranges.get(file, [])
                index = bisect_right(ranges, begin, key=lambda one: one.begin) - 1
                if index < 0 or end > ranges[index].end:
                    return None
                within = ranges[index]._replace(file=file)
                distance = self._places[file][index] - within.begin
            found.append(begin + distance)
        return found

    def _read_part(self, data: Tensor, copied: int, file: Path, offset: int, num_bytes: int) -> int:
        """Read bytes into the buffer, and what fills it to their place in `data`, whose first `copied` bytes are there
        already. Return how many then are."""
        done = 0
        while done < num_bytes:
            if self._num_filled == _BUFFER_BYTES:
                copied = self._copy(data, copied)
            size = min(_BUFFER_BYTES - self._num_filled, num_bytes - done)
            view = self._view[self._num_filled : self._num_filled + size]
            count = os.preadv(self._open(file), [view], offset + done)
            if count == 0:
                self._num_filled = 0
                raise OSError(f"it ends at byte {offset + done:,}")
            done, self._num_filled = done + count, self._num_filled + count
        return copied

    def _skip(self, data: Tensor, copied: int, num_bytes: int) -> int:
        """Leave bytes out of the buffer, whatever they are, as `_read_part` reads them."""
        if self._num_filled + num_bytes > _BUFFER_BYTES:
            num_bytes -= _BUFFER_BYTES - self._num_filled
            self._num_filled = _BUFFER_BYTES
            copied = self._copy(data, copied)
        self._num_filled += num_bytes
        return copied

    def _copy(self, data: Tensor, first: int) -> int:
        """Copy the filled part of the buffer to its place, and return the place after it."""
        size, self._num_filled = self._num_filled, 0
        data[first : first + size].copy_(self._buffer[:size])  # returns when the buffer may be filled anew
        return first + size

    def _open(self, file: Path) -> int:
        if file not in self._fds:
            self._fds[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[file]

    def close(self) -> None:
        """Close the files. Idempotent."""
        self.forget_staged()
        while self._fds:
            os.close(self._fds.popitem()[1])


def _joined(ranges: Iterable[FileRange]) -> list[FileRange]:
    """Return ranges in the order of the files, begun at multiples of `_UNIT`, and joined where little is between
    them."""
    joined: list[FileRange] = []
    for part in sorted(ranges):
        begin, last = part.begin // _UNIT * _UNIT, joined[-1] if joined else None
        if last is not None and last.file == part.file and begin - last.end <= _LARGEST_GAP:
            joined[-1] = FileRange(part.file, last.begin, max(last.end, part.end))
        else:
            joined.append(FileRange(part.file, begin, part.end))
    return joined


def _gather(staged: Tensor, places: Sequence[int], num_bytes: int) -> Tensor:
    """Return parts of what was staged, one after the other, aligned for numbers of any type."""
    step = places[1] - places[0] if len(places) > 1 else num_bytes
    if step >= num_bytes and all(later - earlier == step for earlier, later in pairwise(places)):
        found = staged.as_strided((len(places), num_bytes), (step, 1), places[0]).reshape(-1)
    else:
        found = torch.cat([staged.narrow(0, place, num_bytes) for place in places])
    return found.clone() if found.storage_offset() % _UNIT else found
