"""All errors that nvcli raises on purpose.

    NvcliError
    ├── ConfigError      a key, flag or file of the run is wrong; the message names key, value and fix
    │   └── UnreadableInput  an input cannot be read to its end; answers so far are kept
    ├── LoadError        the checkpoint cannot be read; the message names the file or tensor
    ├── CapacityError    the run does not fit the memory; the message carries the itemised plan and the fix
    │   └── LimitsTooHigh    the weights fit, and lower limits might
    ├── ModelError       the model computes nothing: its logits are NaN or infinite from the first prompt on
    ├── WorkerError      a process of the engine failed, died or stopped answering; names the rank and its phase
    ├── InputChanged     an input has changed since the job began; answers so far are kept
    ├── OutputError      the output cannot be written any further (a full disk); what is written is kept
    ├── RowsMissing      the shards' outputs that are to be joined lack rows of their job
    ├── ClosedError      an LLM is used after it was closed, or while it is asleep
    ├── HopelessJob      the first rows all failed with one cause; the same command continues with the others
    ├── TooManyErrors    more rows failed than `job.max_errors` allows; answers so far are kept
    └── RowError         one input row is bad; it never ends the job but becomes that row's error answer

Messages are for users: one or two lines, no traceback. `cli.main` alone turns them into exit codes.
"""

from __future__ import annotations

import copy
import traceback
from os.path import basename
from typing import TypeVar

INTERNAL_ERROR = "internal_error"
"""Type of a row's error for an unexpected exception."""

_MOST_TRACEBACK_CHARS = 8000
"""Maximum characters kept of a row's traceback: its beginning and its end."""


class NvcliError(Exception):
    """Base of all errors that nvcli reports to its user."""


class ConfigError(NvcliError):
    """The configuration or command line cannot be used as given."""


class UnreadableInput(ConfigError):
    """An input could only be read in part."""


class LoadError(NvcliError):
    """A checkpoint, tokenizer or one of their files cannot be loaded."""


class CapacityError(NvcliError):
    """The model and its working memory do not fit the device."""


class LimitsTooHigh(CapacityError):
    """The weights fit, but not what `max_num_batched_tokens` and `max_num_seqs` take beside them."""


class ModelError(NvcliError):
    """The logits of all prompts are NaN or infinite, so that no row can be answered."""


class WorkerError(NvcliError):
    """An engine or rank process failed, died or stopped answering.

    `traceback` is that of an unexpected exception, a bug in nvcli or in a library; else it is empty. It goes
    into a file (`job.run.early_end`), not into messages.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class InputChanged(NvcliError):
    """An input was changed while the job ran."""


class OutputError(NvcliError):
    """The output cannot be written any further."""


class RowsMissing(NvcliError):
    """Rows of a job are missing from all of the outputs to be joined."""


class TooManyErrors(NvcliError):
    """More rows failed than the job allows."""


class HopelessJob(NvcliError):
    """The first rows of a job all failed with one cause."""


class ClosedError(NvcliError):
    """An LLM is used after it was closed, or while it is asleep."""


class RowError(NvcliError):
    """One row cannot be answered.

    `type` is a short stable identifier (`invalid_json`, `prompt_too_long`, …) that goes into the output row.
    `traceback` is that of an unexpected exception, as with WorkerError; else it is empty.
    """

    def __init__(self, type: str, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.type = type
        self.message = message
        self.traceback = traceback

    def __reduce__(self) -> tuple[type[RowError], tuple[str, str, str]]:
        return RowError, (self.type, self.message, self.traceback)


def unexpected(error: BaseException, doing: str) -> RowError:
    """Return the error of the row during whose handling an unexpected exception was raised. Call it while the exception
    is handled; `doing` is what was being done with the row, as the beginning of a sentence.

    Raises again what is not the row's fault: errors of the run, the end of the process, and a lack of memory.
    """
    is_of_run = isinstance(error, NvcliError | MemoryError) or not (isinstance(error, Exception) or is_panic(error))
    if is_of_run and not isinstance(error, RowError):
        raise error
    lines = "".join(traceback.format_exception(error))
    if len(lines) > _MOST_TRACEBACK_CHARS:
        lines = f"{lines[: _MOST_TRACEBACK_CHARS // 2]}\n…\n{lines[-_MOST_TRACEBACK_CHARS // 2 :]}"
    return RowError(INTERNAL_ERROR, f"{doing} failed: {first_line(error)}; this is a bug, please report it", lines)


def is_panic(error: BaseException) -> bool:
    """Whether an exception is a panic of Rust code, which is not an `Exception`."""
    return type(error).__module__ == "pyo3_runtime"


def named(kind: str, message: str, traceback: str = "") -> NvcliError:
    """Return an error by its class name, as reported by another process.

    RowErrors are never reported like this. Only WorkerErrors have a traceback.
    """
    if kind == WorkerError.__name__:
        return WorkerError(message, traceback)
    error: type[NvcliError] = globals()[kind]
    return error(message)


Error = TypeVar("Error", bound=BaseException)


def reworded(error: Error, message: str) -> Error:
    """Return the same error with another message."""
    other = copy.copy(error)
    other.args = (message,)
    return other


def first_line(error: BaseException) -> str:
    """Return the class and the first line of an exception's message; for an assertion without a message, its place."""
    lines = str(error).strip().splitlines()
    if lines:
        return f"{type(error).__name__}: {lines[0]}"
    place = traceback.extract_tb(error.__traceback__)[-1:] if isinstance(error, AssertionError) else []
    return "".join([type(error).__name__, *(f" at {basename(at.filename)}:{at.lineno}" for at in place)])
