"""The way in: the `nvcli` command, its subcommands, and the exit code of each way in which they end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Annotated

import typer

from nvcli.cli.bench import bench
from nvcli.cli.doctor import doctor
from nvcli.cli.generate import generate
from nvcli.cli.messages import Interrupted, OutputGone, say, say_failure
from nvcli.cli.profile_memory import profile_memory
from nvcli.end_signals import handle_end_signals
from nvcli.standard_streams import secure_standard_streams

_GENERATE_EXIT_CODES = """Exit codes: 0 every row was answered; 1 some rows carry errors; 2 usage, configuration or
model; 3 the engine or the disk failed, or a file was changed; 130 interrupted. After 1 by --max-errors, 3 and 130 the
same command goes on."""
_DOCTOR_EXIT_CODES = "Exit codes: 0 nothing found would stop a run; 1 something would; 2 usage or configuration."

app = typer.Typer(
    name="nvcli",
    help="""Offline LLM generation on one machine: a JSONL file in, a JSONL file out.

    \b
    Examples:
      nvcli generate questions.jsonl --model demo
      nvcli doctor --model Qwen/Qwen3-8B --tp 2
      nvcli COMMAND --help
    """,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=_GENERATE_EXIT_CODES)(generate)
app.command()(bench)
app.command(name="profile-memory")(profile_memory)
app.command(epilog=_DOCTOR_EXIT_CODES)(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        from nvcli.versions import describe_versions

        typer.echo(describe_versions())
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions of nvcli, Python, torch with its CUDA, and Triton.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the `nvcli` command and end the process with its exit code."""
    secure_standard_streams()
    handle_end_signals(_interrupt)  # a job has a way of its own, while it runs
    try:
        code = _run()
    except Interrupted:
        code = 130
    handle_end_signals(signal.SIG_IGN)
    _exit(code)


def _run() -> int:
    """Run the command that the arguments name, say how it failed if it did, and return its exit code."""
    from nvcli.errors import InputChanged, NvcliError, OutputError, TooManyErrors, WorkerError

    try:
        app(prog_name="nvcli")  # ends with SystemExit, its own usage errors included (2)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except Interrupted as end:
        say(f"interrupted; {end}")
        code = 130
    except OutputGone:
        code = 141  # as a command that SIGPIPE ends
    except (WorkerError, InputChanged, OutputError) as error:
        say_failure(error)
        code = 3
    except TooManyErrors as error:
        say(f"ended: {error}")
        code = 1
    except NvcliError as error:
        say(f"error: {error}")
        code = 2
    except Exception:
        import traceback

        traceback.print_exc()
        say("this is a bug in nvcli; please report it with the lines above")
        code = 3
    return code


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted("the same command goes on")


def _exit(code: int) -> None:
    """End the process, without waiting for a background thread that reads or imports and cannot be told to stop."""
    if threading.active_count() > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
