"""Where the traceback of a process that failed goes: into a file beside the output, not into the user's messages."""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from pathlib import Path

from nvcli.errors import NvcliError, WorkerError, reworded
from nvcli.jobs.files import STREAM
from nvcli.versions import describe_versions


def keep_traceback(error: NvcliError, output: str | None = None) -> NvcliError:
    """The error whose message names the file that its traceback was added to; one that has none as it is.

    `output`: the run's; without one, or where nothing can be written there, the file is a temporary one.
    """
    if not isinstance(error, WorkerError) or not error.traceback:
        return error
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    text = f"{when}  {shlex.join(sys.argv)}\n{describe_versions()}\n{error}\n{error.traceback.rstrip()}\n\n"
    path = _append(text, output)
    kept = reworded(error, f"{error} (traceback: {path})" if path is not None else str(error))
    kept.traceback = ""
    return kept


def _append(text: str, output: str | None) -> Path | None:
    """The file; None where there is room nowhere."""
    if output is not None and output != STREAM:
        path = Path(f"{output}.traceback.txt")
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
            return path
        except OSError:
            pass
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="nvcli-", suffix=".traceback.txt", delete=False
        ) as temporary:
            temporary.write(text)
        return Path(temporary.name)
    except OSError:
        return None
