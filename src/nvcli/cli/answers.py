"""Answers for a person at a terminal: the model is loaded on the spot, and answers are streamed."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import msgspec

from nvcli.cli.messages import say, say_warning
from nvcli.core.byte_sizes import counted
from nvcli.core.config import JobConfig, RunConfig
from nvcli.core.system.terminal_text import harmless
from nvcli.errors import ConfigError

if TYPE_CHECKING:
    from nvcli.llm.answer import Answer
    from nvcli.llm.llm import LLM, AnswerStream

_OF_FILES = ("prompt_field", "messages_field", "id_field", "prompt_template", "messages_template")
_OF_CONVERSATIONS = ("system", "chat_template", "chat_template_kwargs")


def config_for_person(run: RunConfig, *, raw: bool = False) -> RunConfig:
    """Return the configuration without the keys of `job` about columns of files, and about conversations if `raw`; and
    without images, which are not typed. Raises ConfigError for a task without answers."""
    if run.task != "generate":
        raise ConfigError(f"`task` is {run.task}, whose rows get no answers; leave it out, or: --set task=generate")
    defaults = {key: getattr(JobConfig(), key) for key in (*_OF_FILES, *(_OF_CONVERSATIONS if raw else ()))}
    job = msgspec.structs.replace(run.job, **defaults, chat="never" if raw else run.job.chat)
    return msgspec.structs.replace(run, job=job, images="never")


def load_for_person(run: RunConfig, *, num_requests: int, needs_chat_template: bool = False) -> LLM:
    """Load the model, and say so on a terminal. Of the notes only warnings are shown.

    The keywords are those of `LLM.from_config`. Raises ConfigError if nothing can be written to standard output.
    """
    if sys.__stdout__ is None:
        raise ConfigError("standard output is closed, and answers go there; leave it open")
    from nvcli.job.run.engine_ahead import EngineAhead

    if sys.stderr.isatty():
        say(f"loading {run.model} …")
    with contextlib.closing(EngineAhead()) as ahead:
        from nvcli.llm.llm import LLM

        return LLM.from_config(
            run,
            note=say_warning,
            start=ahead.start_engine,
            num_requests=num_requests,
            needs_chat_template=needs_chat_template,
        )


def write(text: str) -> None:
    """Write a piece of an answer to standard output, with control characters made visible on a terminal.

    Raises OutputGone if nobody reads it any more.
    """
    if sys.stdout.isatty():
        text = harmless(text)
    sys.stdout.write(text)
    sys.stdout.flush()


def show_stream(stream: AnswerStream) -> Answer:
    """Stream an answer, then write the others of its row (`n`), separated by empty lines; return all."""
    for piece in stream:
        write(piece)
    answer = stream.answer
    if answer.error is None:
        end_line(stream.text)
        for text in answer.texts[1:]:
            write(f"\n{text}")
            end_line(text)
    elif stream.text:  # it failed halfway
        end_line(stream.text)
    return answer


def end_line(text: str) -> None:
    """End the line that a text began."""
    if not text.endswith("\n"):
        write("\n")


def say_if_cut(answer: Answer) -> None:
    """Tell the user that an answer was cut."""
    if answer.finish_reason == "length":
        tokens = answer["usage"]["completion_tokens"]
        say(f"cut after {counted(tokens, 'token')}; the limits are --max-tokens and --max-model-len")
