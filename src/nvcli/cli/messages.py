"""Messages on standard error, and the exception that ends a command early without an error."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

from nvcli.core.system.terminal_text import without_secrets

if TYPE_CHECKING:
    from pathlib import Path

    from nvcli.errors import NvcliError


class Interrupted(BaseException):
    """The user stopped the command; the message says what to do next.

    Not an `Exception`, like KeyboardInterrupt, so that no library catches it as a failure.
    """


def say(text: str) -> None:
    """Print one message to standard error, with passwords in addresses hidden."""
    typer.echo(f"nvcli: {without_secrets(text)}", err=True)


def say_warning(note: str) -> None:
    """Print a note of the engines if it is a warning."""
    if note.startswith("warning: "):
        say(note)


def choose_config_file(named: Path | None) -> Path | None:
    """Return the configuration file to read, as `find_config_file` does, and say so if one was found.

    Says so even with --quiet: the file may change everything that a command does.
    """
    from nvcli.core.config_file import NO_FILE, find_config_file

    path = find_config_file(named)
    if named is None and path is not None:
        say(f"using the configuration in {path}; -c names another, -c {NO_FILE} leaves it out")
    return path


def say_error(text: str) -> None:
    """Print an error to standard error, in red on a terminal (unless NO_COLOR is set)."""
    word = "error:" if os.environ.get("NO_COLOR") else typer.style("error:", fg="red", bold=True)
    say(f"{word} {text}")  # typer strips colours from output to a file


def say_failure(error: NvcliError) -> None:
    """Print an error as one line. A traceback that is not saved yet goes into a file, which the line names."""
    from nvcli.job.run.early_end import keep_traceback

    say_error(str(keep_traceback(error)))
