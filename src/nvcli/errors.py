"""Everything nvcli raises on purpose.

    NvcliError
    ├── ConfigError      a key, flag or file of the run is wrong; the message names key, value and fix
    ├── LoadError        the checkpoint cannot be read; the message names the file or tensor
    ├── CapacityError    the run does not fit the memory; the message carries the itemised plan and the fix
    │   └── LimitsTooHigh    the weights fit, and lower limits might
    ├── ModelError       the model computes nothing: its logits are NaN or infinite from the first prompt on
    ├── WorkerError      a process of the engine failed, died or stopped answering; names the rank and its phase
    ├── InputChanged     an input is not what it was when the job began; what is answered stays
    ├── OutputError      the output cannot be written any further (a full disk); what is written stays
    ├── RowsMissing      the outputs of shards that are to be joined do not have all rows of their job
    ├── ClosedError      an LLM is used after it was closed
    ├── HopelessJob      the first rows all failed with one cause; the same command goes on with the others
    ├── TooManyErrors    more rows failed than `job.max_errors` allows; what is answered stays
    └── RowError         one input row is bad; it never ends the job, it becomes that row's error answer

Messages are for users: one or two lines, no traceback. `cli.main` alone turns them into exit codes.
"""

from __future__ import annotations

import copy
import traceback
from typing import TypeVar

INTERNAL_ERROR = "internal_error"
"""The type of a row's error that nobody foresaw."""

_MOST_TRACEBACK_CHARS = 8000
"""Characters of a row's traceback that are kept: its beginning and its end."""


class NvcliError(Exception):
    """Base of all errors that nvcli reports to its user."""


class ConfigError(NvcliError):
    """The configuration or command line cannot be used as given."""


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

    `traceback` is that of an unexpected exception, which is a bug in nvcli or in a library; else it is empty. It goes
    into a file (`job_run.early_end`), not into messages.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class InputChanged(NvcliError):
    """An input was changed while the job ran."""


class OutputError(NvcliError):
    """The output cannot be written any further."""


class RowsMissing(NvcliError):
    """Rows of a job are in none of the outputs that are to be joined."""


class TooManyErrors(NvcliError):
    """More rows failed than the job allows."""


class HopelessJob(NvcliError):
    """The first rows of a job all failed with one cause."""


class ClosedError(NvcliError):
    """An LLM is used that was closed."""


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


def unexpected(error: BaseException, doing: str) -> RowError:
    """Return the error of the one row that was handled when an unexpected exception came up. Call it while the
    exception is handled; `doing` is what was done with the row, as the beginning of a sentence.

    What is no fault of a row is raised again: errors of the run, the end of the process, and memory that ran out.
    """
    is_of_run = isinstance(error, NvcliError | MemoryError) or not (isinstance(error, Exception) or is_panic(error))
    if is_of_run and not isinstance(error, RowError):
        raise error
    lines = "".join(traceback.format_exception(error))
    if len(lines) > _MOST_TRACEBACK_CHARS:
        lines = f"{lines[: _MOST_TRACEBACK_CHARS // 2]}\n…\n{lines[-_MOST_TRACEBACK_CHARS // 2 :]}"
    return RowError(INTERNAL_ERROR, f"{doing} failed: {first_line(error)}; this is a bug, please report it", lines)


def is_panic(error: BaseException) -> bool:
    """Whether an exception is a panic of Rust code, which is no `Exception`."""
    return type(error).__module__ == "pyo3_runtime"


def named(kind: str, message: str, traceback: str = "") -> NvcliError:
    """Return the error of a class name, as another process reported it.

    RowErrors are never reported so. Only WorkerErrors have a traceback.
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
    """Return the class and the first line of an exception's message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
