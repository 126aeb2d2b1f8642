"""What to type to continue a job that was cut short."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from nvcli.errors import NvcliError
from nvcli.jobs.files import STREAM, choose_output, expand_inputs
from nvcli.jobs.manifest import manifest_path


def resume_hint(argv: Sequence[str], *, inputs: Sequence[str], output: str | None, started: float) -> str:
    """One or two lines.

    `argv`: the command line of this run; `inputs` and `output`: as they were given; `started`: when it began, in
    seconds since 1970.
    """
    try:
        name = choose_output(expand_inputs(inputs, output), output)
    except NvcliError:
        return "nothing was answered yet"
    if name == STREAM:
        return "the rows answered so far were written; standard output cannot be continued"
    manifest = manifest_path(Path(name))
    is_old = "--overwrite" in argv and manifest.exists() and manifest.stat().st_mtime < started
    if is_old:  # of the output that was to be overwritten, and still is
        return f"nothing was answered yet; start again with:\n  {_command(argv)}"
    if manifest.exists():
        return f"the rows answered so far are in {name}; continue with:\n  {resume_command(argv)}"
    if Path(name).is_file() and Path(name).stat().st_size:
        return f"the rows answered so far are in {name}; it cannot be continued, because its input was no file"
    return f"nothing was answered yet; start again with:\n  {resume_command(argv)}"


def resume_command(argv: Sequence[str]) -> str:
    """This run's command, quoted for a shell, without what would undo what it has done."""
    return _command([word for word in argv if word not in ("--overwrite", "--retry-errors")])


def _command(argv: Sequence[str]) -> str:
    program, *arguments = argv
    start = ["nvcli"] if Path(program).name == "nvcli" else [sys.executable, "-m", "nvcli"]
    return shlex.join([*start, *arguments])
