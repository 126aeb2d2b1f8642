"""`nvcli chat`: a conversation with a model, at a terminal or through a pipe."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

from nvcli.cli.answers import config_for_person, load_for_person, say_if_cut, show_stream, write
from nvcli.cli.messages import Interrupted, say, say_error
from nvcli.cli.options import Settings, keys_of, with_options

if TYPE_CHECKING:
    from nvcli.llm.answer import Answer
    from nvcli.llm.llm import AnswerStream

_OF_MANY = ("device", "max_num_seqs", "data_parallel_size", "sampling.n", "sampling.logprobs")
"""Keys without an option here, because they are for many rows or answers."""


@with_options(
    *keys_of("", "speculation", "sampling", without=_OF_MANY),
    "job.system",
    "job.chat_template",
    "job.chat_template_kwargs",
)
def chat(*, settings: Settings) -> None:
    """Chat with a model, to get to know it before spending hours on a job.

    Each line is a message, and its answer is streamed. /help shows the commands. Ctrl-C stops an answer, Ctrl-D
    ends the chat. From a pipe each line of standard input is a message, and standard output holds the answers.

    \b
    Examples:
      nvcli chat -m demo
      nvcli chat -m Qwen/Qwen3-8B --system 'Be brief.' --chat-template-kwargs '{"enable_thinking": false}'
    """
    import msgspec

    run = settings.load()

    import typer

    from nvcli.core.system.end_signals import at_safe_place
    from nvcli.llm.chat import Chat, run_chat

    run = config_for_person(run)
    if run.sampling.get("n", 1) != 1:
        say("warning: `sampling.n` has no effect in a chat, where each message gets one answer")
    own_system = run.job.system
    run = msgspec.structs.replace(
        run, data_parallel_size=1, job=msgspec.structs.replace(run.job, system=None, on_too_long="error")
    )
    with load_for_person(run, num_requests=1, needs_chat_template=True) as llm:
        person = _person()
        # From now on Ctrl-C stops the answer, or discards the line being typed.
        before = signal.signal(signal.SIGINT, at_safe_place(signal.default_int_handler))
        try:
            run_chat(Chat(llm, system=own_system), person)
        except KeyboardInterrupt:
            raise Interrupted("the chat has ended") from None
        finally:
            signal.signal(signal.SIGINT, before)
    if person.has_failed:
        raise typer.Exit(1)


class _Pipe:
    """A program that writes messages to our standard input, line by line, and reads answers from standard output."""

    has_failed = False
    """Whether a line was not answered."""

    def read_line(self, *, goes_on: bool) -> str | None:
        from nvcli.errors import ConfigError

        try:
            # As bytes: with a locale such as C.UTF-8, text may be what is not UTF-8.
            line = sys.stdin.buffer.readline() if sys.stdin is not None else b""
            return line.decode().rstrip("\r\n") if line else None
        except UnicodeDecodeError:
            raise ConfigError("a line of standard input is not UTF-8 text; convert it with iconv") from None
        except KeyboardInterrupt:
            raise Interrupted("the chat has ended") from None

    def show(self, stream: AnswerStream) -> Answer:
        try:
            return _show(stream)
        except KeyboardInterrupt:
            raise Interrupted("the chat has ended") from None

    def say(self, text: str) -> None:
        say(text)

    def say_error(self, text: str) -> None:
        say_error(text)
        self.has_failed = True


class _Terminal(_Pipe):
    """A person at a terminal. Lines can be edited, and earlier ones recalled with the arrow keys."""

    def say_error(self, text: str) -> None:
        say_error(text)

    def read_line(self, *, goes_on: bool) -> str | None:
        import readline  # noqa: F401 - `input` edits lines with it

        try:
            return input("… " if goes_on else "> ")
        except EOFError:
            write("\n")
            return None
        except UnicodeDecodeError:
            self.say_error("that line is not UTF-8 text")
            return ""
        except KeyboardInterrupt:
            write("\n")
            self.say("Ctrl-D or /exit ends the chat")
            raise

    def show(self, stream: AnswerStream) -> Answer:
        try:
            return _show(stream)
        except KeyboardInterrupt:
            write("\n")
            self.say("stopped")
            raise


def _show(stream: AnswerStream) -> Answer:
    answer = show_stream(stream)
    say_if_cut(answer)
    return answer


def _person() -> _Pipe:
    if sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty():
        say("/help shows the commands, Ctrl-D ends the chat")
        return _Terminal()
    return _Pipe()
