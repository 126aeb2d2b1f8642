"""The messages that a rank's process sends to the executor other than the outputs of steps, and StatusBoard: a note of
what each rank is doing, readable by the engine even when the rank no longer answers."""

from __future__ import annotations

import mmap
import os
import struct
import traceback
from dataclasses import dataclass
from textwrap import shorten

from nvcli.core.messages import StepOutput
from nvcli.core.system.file_limits import resize_memory_file
from nvcli.errors import NvcliError, first_line

_MAX_REASON = 200
"""Maximum length, in characters, of a reason that fits the message."""


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A failed rank's last message: the error's class name (in `nvcli.errors`), its message and its traceback."""

    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RankFailed:
        """Describe the exception that is being handled."""
        if isinstance(error, NvcliError):
            return cls(type(error).__name__, str(error), "")
        return cls("WorkerError", first_line(error), traceback.format_exc())


@dataclass(frozen=True, slots=True)
class RankClosed:
    """The last message of a rank that was told to end, sent if `record_steps` is on."""

    peak_bytes: int


@dataclass(frozen=True, slots=True)
class StepNotRun:
    """The output of a step that did not run because memory ran out, in it or before it. With several ranks it is also a
    message: the rank runs no further step."""

    step_id: int
    reason: str

    def result(self) -> StepOutput:
        reason = shorten(self.reason, _MAX_REASON, placeholder=" …")
        return StepOutput(step_id=self.step_id, token_ids=b"", out_of_memory=reason)


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
