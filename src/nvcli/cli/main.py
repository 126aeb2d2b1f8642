"""Entry point: the `nvcli` command, its subcommands, and their exit codes."""

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
from nvcli.cli.chat import chat
from nvcli.cli.check import check
from nvcli.cli.compare_quality import compare_quality
from nvcli.cli.doctor import doctor
from nvcli.cli.generate import generate
from nvcli.cli.merge import merge
from nvcli.cli.messages import Interrupted, say, say_error, say_failure
from nvcli.cli.models import models
from nvcli.cli.options import GroupedCommand
from nvcli.cli.profile_memory import profile_memory
from nvcli.cli.score import classify, embed, score
from nvcli.cli.show import show
from nvcli.cli.usage_hints import usage_message
from nvcli.core.system.end_signals import handle_end_signals, watch_main_thread
from nvcli.core.system.standard_streams import OutputGone, secure_standard_streams

_GENERATE_EXIT_CODES = """Exit codes: 0 every row was answered; 1 some rows carry errors; 2 usage, configuration or
model; 3 the engine or the disk failed, or a file was changed; 130 interrupted. After 1 by --max-errors, 3 and 130
the same command continues the job."""
_CHAT_EXIT_CODES = """Exit codes: 0 every message was answered, or the chat was interactive; 1 some messages
from a pipe were not; 2 usage, configuration or model; 3 the engine failed; 130 interrupted."""
_CHECK_EXIT_CODES = """Exit codes: 0 every row can be answered; 1 some rows cannot; 2 usage, configuration, or a model
that does not fit; 130 interrupted."""
_MERGE_EXIT_CODES = """Exit codes: 0 every row is there and answered; 1 some rows are missing or carry errors; 2 usage,
or outputs that do not belong together; 3 a file cannot be read or written; 130 interrupted. After 3 and 130 the same
command continues."""
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
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command, _short_help, _exit_codes in (
    (generate, "Answer every row of files with a model.", _GENERATE_EXIT_CODES),
    (chat, "Chat with a model.", _CHAT_EXIT_CODES),
    (score, "Compute how likely a model finds given texts.", _GENERATE_EXIT_CODES),
    (embed, "Compute an embedding of every row.", _GENERATE_EXIT_CODES),
    (classify, "Compute a reward or the classes of every row.", _GENERATE_EXIT_CODES),
    (check, "Report what a job will do, before it takes hours.", _CHECK_EXIT_CODES),
    (show, "Show the answers of an output, a page at a time.", None),
    (merge, "Join the outputs of a job's shards into one.", _MERGE_EXIT_CODES),
    (bench, "Measure how fast a model runs here.", None),
    (profile_memory, "Show where the memory of each GPU goes, and what to change.", None),
    (compare_quality, "Measure how far one configuration's answers are from another's.", None),
    (doctor, "Check whether this machine is ready for a run.", _DOCTOR_EXIT_CODES),
    (models, "List the supported families of models.", None),
):
    app.command(cls=GroupedCommand, short_help=_short_help, epilog=_exit_codes)(_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from nvcli.core.system.versions import describe_versions

        typer.echo(describe_versions())
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
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
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def main() -> None:
    """Run the `nvcli` command and end the process with its exit code."""
    code = 130
    is_over = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not is_over:
            raise Interrupted("run the same command again")

    secure_standard_streams()
    watch = watch_main_thread(_give_up)
    try:
        handle_end_signals(interrupt)  # a running job has its own handling
        code = _run()
    except (Interrupted, KeyboardInterrupt):
        pass
    finally:
        is_over = True  # Python calls no handler between the `try` and here
    handle_end_signals(signal.SIG_IGN)
    _exit(code, watch)


def _run() -> int:
    """Run the command of the arguments, report an error if it fails, and return its exit code."""
    from nvcli.errors import InputChanged, ModelError, NvcliError, OutputError, RowsMissing, TooManyErrors, WorkerError

    try:
        result = app(prog_name="nvcli", standalone_mode=False)  # the exit code of `typer.Exit`, or None
        code = result if isinstance(result, int) else 0
    except SystemExit as end:  # of shell completion
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except typer.TyperException as error:
        say_error(_usage_message(error))
        code = 2
    except Interrupted as end:
        say(f"interrupted; {end}")
        code = 130
    except OutputGone:
        code = 141  # like a command that SIGPIPE ends
    except (WorkerError, ModelError, InputChanged, OutputError) as error:
        say_failure(error)
        code = 3
    except RowsMissing as error:
        say_error(str(error))
        code = 1
    except TooManyErrors as error:
        say(f"ended: {error}")
        code = 1
    except NvcliError as error:
        say_error(str(error))
        code = 2
    except Exception:
        import traceback

        traceback.print_exc()
        say("this is a bug in nvcli; please report it with the lines above")
        code = 3
    return code


def _usage_message(error: typer.TyperException) -> str:
    """Return typer's message for a command line that it cannot parse, in our style, and where to find help."""
    text = usage_message(error)
    context: typer.Context | None = getattr(error, "ctx", None)
    if context is not None:
        command = context.command_path
    else:  # an option without its value: typer does not name the command
        names = [info.name or getattr(info.callback, "__name__", "") for info in app.registered_commands]
        command = f"nvcli {sys.argv[1]}" if sys.argv[1:2] and sys.argv[1] in names else "nvcli"
    return f"{text[:1].lower()}{text[1:]}\n  see: {command} --help"


def _give_up() -> None:
    say("interrupted while a file system does not answer; run the same command again")
    os._exit(130)


def _exit(code: int, watch: threading.Thread) -> None:
    """End the process, without waiting for background threads that read or import and cannot be stopped."""
    if any(thread not in (threading.main_thread(), watch) for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
