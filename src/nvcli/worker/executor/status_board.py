"""StatusBoard: a note of what each rank is doing, readable by the engine even when the rank no longer answers."""

from __future__ import annotations

import mmap
import os
import struct

from nvcli.core.system.file_limits import resize_memory_file

_ENTRY = struct.Struct("<q48s")  # step id or -1, phase in UTF-8


class StatusBoard:
    """A board with one fixed-size entry per rank, in anonymous shared memory. Each rank writes only its own entry."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        self._memory = mmap.mmap(fd, num_ranks * _ENTRY.size)

    @staticmethod
    def create(num_ranks: int) -> int:
        """Create a board's memory; return the descriptor with which the executor and the ranks open it."""
        fd = os.memfd_create("nvcli-status")
        resize_memory_file(fd, num_ranks * _ENTRY.size)
        return fd

    def report(self, rank: int, phase: str, step_id: int = -1) -> None:
        """Note what this rank is doing: a phase, or a step's number."""
        _ENTRY.pack_into(self._memory, rank * _ENTRY.size, step_id, phase.encode()[:48])

    def describe(self, rank: int) -> str:
        """Say what a rank is doing, such as `load weights` or `step 57`."""
        step_id, phase = _ENTRY.unpack_from(self._memory, rank * _ENTRY.size)
        name = phase.rstrip(b"\0").decode(errors="replace") or "start-up"
        return name if step_id < 0 else f"{name} {step_id}"
