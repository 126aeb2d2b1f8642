"""Messages on standard error, and the two ways in which a command ends early without an error."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

from nvcli.terminal_text import without_secrets

if TYPE_CHECKING:
    from pathlib import Path

    from nvcli.errors import NvcliError


class Interrupted(BaseException):
    """The user stopped the command; `str` says what to do next.

    It is no `Exception`, as KeyboardInterrupt is none, so that no library takes it for a failure and keeps it.
    """


class OutputGone(Exception):
    """Whoever read the command's standard output has gone."""


def output_gone() -> OutputGone:
    """Return the error of a command whose reader has gone, and let what is left in the buffer go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return OutputGone()


def say(text: str) -> None:
    """Print one message to standard error, without the passwords of addresses in it."""
    typer.echo(f"nvcli: {without_secrets(text)}", err=True)


def choose_config_file(named: Path | None) -> Path | None:
    """Return the configuration file to read, as `find_config_file` does, and say of one that was found.

    That is said also where notes are not wanted: it may change everything that a command does.
    """
    from nvcli.config_file import NO_FILE, find_config_file

    path = find_config_file(named)
    if named is None and path is not None:
        say(f"using the configuration in {path}; -c names another, -c {NO_FILE} leaves it out")
    return path


def say_error(text: str) -> None:
    """Print an error to standard error, in red where that is a terminal (unless NO_COLOR is set)."""
    word = "error:" if os.environ.get("NO_COLOR") else typer.style("error:", fg="red", bold=True)
    say(f"{word} {text}")  # typer takes colours out of what goes to a file


def say_failure(error: NvcliError) -> None:
    """Print an error as one line. A traceback that nobody has kept goes into a file, which the line names."""
    from nvcli.job_run.early_end import keep_traceback

    say_error(str(keep_traceback(error)))
