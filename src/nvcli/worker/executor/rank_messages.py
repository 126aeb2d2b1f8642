"""The messages that a rank's process sends to the executor besides the outputs of steps."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from textwrap import shorten

from nvcli.core.messages import StepOutput
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
