"""Early ends of a run: signals, errors whose traceback is kept, and hints on what to type next."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType

from nvcli.core.system.end_signals import handle_end_signals
from nvcli.core.system.regular_file import open_unlinked
from nvcli.core.system.terminal_text import without_secrets
from nvcli.core.system.versions import describe_versions
from nvcli.errors import NvcliError, WorkerError, reworded
from nvcli.job.files import STREAM, choose_output, expand_inputs
from nvcli.job.job import RETRYABLE_ERRORS, JobResult
from nvcli.job.own_files import manifest_path, rows_path, traceback_path
from nvcli.job.shard import Shard

_MOST_ROW_CHARS = 256 * 1024
"""Maximum size of the row tracebacks that a run keeps, in characters."""


class Interrupts:
    """While entered, the first signal that asks for the end is remembered for `check`; the next interrupts at once.

    Those signals are SIGINT, SIGTERM, SIGHUP and SIGQUIT (`end_signals`).

    Outside the main thread, where Python handles no signals, it does nothing.
    """

    def __init__(self) -> None:
        self._pending = False
        self._is_at_once = False
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handle_end_signals(self._remember).items():
                self._restore.callback(signal.signal, number, handler)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore.close()

    def check(self) -> None:
        """Raise KeyboardInterrupt if there has been a signal."""
        if self._pending:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Let the first signal raise KeyboardInterrupt in the body of the `with` too: for reads that may block."""
        self._is_at_once = True
        try:
            self.check()
            yield
        finally:
            self._is_at_once = False

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._pending or self._is_at_once:
            raise KeyboardInterrupt
        self._pending = True


def keep_traceback(error: NvcliError, output: str | None = None) -> NvcliError:
    """Add an error's traceback to a file, and return the error with a message that names the file.

    An error without a traceback is returned as it is. The file lies beside `output`; without one, or where nothing can
    be written there, it is a temporary file.
    """
    if not isinstance(error, WorkerError) or not error.traceback:
        return error
    path = _append(_entry(str(error), error.traceback), _beside(output))
    kept = reworded(error, f"{error} (traceback: {path})" if path is not None else str(error))
    kept.traceback = ""
    return kept


class RowTracebacks:
    """Keeps the tracebacks of rows that failed with an unexpected exception, and says so once.

    They go into the file that `keep_traceback` would choose: each different one once, as long as they are few and
    small.
    """

    def __init__(self, output: str | None, say: Callable[[str], None]) -> None:
        self._path = _beside(output)
        self._say = say
        self._kept: set[str] = set()
        self._num_chars = 0

    def add(self, result: JobResult) -> None:
        """Keep the traceback of a row."""
        is_full = self._num_chars + len(result.traceback) > _MOST_ROW_CHARS
        if result.traceback in self._kept or is_full or result.error is None:
            return
        self._path = _append(_entry(result.error.message, result.traceback), self._path)
        if not self._kept:
            where = f" (traceback: {self._path})" if self._path is not None else ""
            self._say(
                f"warning: {result.error.message}{where}. The run continues; other such rows are not reported here"
            )
        self._kept.add(result.traceback)
        self._num_chars += len(result.traceback)


def _entry(message: str, traceback: str) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    entry = f"{when}  {shlex.join(sys.argv)}\n{describe_versions()}\n{message}\n{traceback.rstrip()}\n\n"
    return without_secrets(entry)


def _beside(output: str | None) -> Path | None:
    """Return the file for tracebacks beside an output; None: there is none."""
    return None if output is None or output == STREAM else traceback_path(Path(output))


def _append(text: str, path: Path | None) -> Path | None:
    """Append to a file, or to a new temporary one, and return its path; None if neither can be written."""
    with contextlib.suppress(OSError):
        if path is not None:
            with open(open_unlinked(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a", encoding="utf-8") as file:
                file.write(text)
            return path
    with contextlib.suppress(OSError):
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="nvcli-", suffix=".traceback.txt", delete=False
        ) as temporary:
            temporary.write(text)
        return Path(temporary.name)
    return None


def resume_hint(
    argv: Sequence[str],
    *,
    inputs: Sequence[str],
    output: str | None,
    has_begun: bool,
    shard: Shard | None = None,
) -> str:
    """Return one or two lines that say what was answered, and what to type to go on.

    `argv` is the command line of this run, `inputs`, `output` and `shard` are as they were given, and `has_begun` says
    whether the run has begun a new output, in place of one that was there.
    """
    try:
        name = choose_output(expand_inputs(inputs, output), output, shard)
    except NvcliError:
        return "nothing was answered yet"
    if name == STREAM:
        return "the rows answered so far were written; standard output cannot be continued"
    manifest, files = manifest_path(Path(name)), (rows_path(Path(name)), Path(name))
    rows = next((file for file in files if file.is_file() and file.stat().st_size), None)
    if "--overwrite" in argv and not has_begun:  # what is there is still the output that was to be overwritten
        return f"nothing was answered yet; start again with:\n  {_command(argv)}"
    if rows and manifest.exists():
        return f"the rows answered so far are in {rows}; continue with:\n  {resume_command(argv)}"
    if rows:
        return f"the rows answered so far are in {rows}; it cannot be continued, because its input was not a file"
    return f"nothing was answered yet; start again with:\n  {resume_command(argv)}"


def resume_command(argv: Sequence[str]) -> str:
    """Return this run's command, quoted for a shell, without flags that would undo its work."""
    return _command([word for word in argv if word not in ("--overwrite", "--retry-errors")])


def go_on_hint(argv: Sequence[str]) -> str:
    """Return lines on how to go on with a job whose first rows all failed. `argv` is the command line of this run."""
    command = resume_command(argv)
    return (
        "change the settings and run the job again, or fix the input and add --update; to continue anyway:\n"
        f"  {command} --set job.max_leading_errors=0"
    )


def next_steps(argv: Sequence[str], *, output: str, errors: Collection[str]) -> dict[str, str]:
    """Return what to type after a job that came to its end: commands, each with what it does.

    `argv` is the command line of this run, `output` the output's name (`-`: standard output), and `errors` holds the
    error types of its failed rows.
    """
    if output == STREAM or not Path(output).is_file():
        return {}
    program = _command(argv[:1])
    name = shlex.quote(f"./{output}" if output.startswith("-") else output)
    if not errors:
        return {f"{program} show {name}": "shows the answers"}
    steps = {f"{program} show {name} --errors": "shows the failed rows"}
    if not manifest_path(Path(output)).exists():
        return steps
    return steps | steps_for_errors(resume_command([word for word in argv if word != "--update"]), errors)


def steps_for_errors(command: str, errors: Collection[str]) -> dict[str, str]:
    """Return what to type about failed rows with these error types: commands, each with what it does.

    `command` is that of the job.
    """
    again, same = RETRYABLE_ERRORS.intersection(errors), set(errors) - RETRYABLE_ERRORS
    steps = {}
    if again:
        kinds = ", ".join(sorted(again))
        steps[f"{command} --retry-errors"] = f"tries the failed rows again, as {kinds} may go away"
    if same:
        kinds = ", ".join(sorted(same))
        steps[f"{command} --update"] = f"answers the rows of {kinds} once they are fixed in the input"
    return steps


def _command(argv: Sequence[str]) -> str:
    program, *arguments = argv
    start = ["nvcli"] if Path(program).name == "nvcli" else [sys.executable, "-m", "nvcli"]
    return without_secrets(shlex.join([*start, *arguments]))
