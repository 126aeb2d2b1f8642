"""How the answer to a person is shown: as it comes, and what there is to say of its end."""

from __future__ import annotations

import sys

from nvcli.cli.messages import output_gone, say
from nvcli.llm.answer import Answer
from nvcli.llm.llm import AnswerStream
from nvcli.terminal_text import harmless


def write(text: str) -> None:
    """Write a piece of an answer to standard output, with control characters shown where a terminal would obey them.

    Raises OutputGone where nobody reads it any more.
    """
    if sys.stdout.isatty():
        text = harmless(text)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise output_gone() from None


def show_stream(stream: AnswerStream) -> Answer:
    """Write an answer as it comes, then the others of its row (`n`), with an empty line between two; return all."""
    for piece in stream:
        write(piece)
    answer = stream.answer
    if answer.error is None:
        end_line(stream.text)
        for text in answer.texts[1:]:
            write(f"\n{text}")
            end_line(text)
    elif stream.text:  # it failed in its middle
        end_line(stream.text)
    return answer


def end_line(text: str) -> None:
    """End the line that a text has begun."""
    if not text.endswith("\n"):
        write("\n")


def say_if_cut(answer: Answer) -> None:
    """Tell the user that an answer was not at its end."""
    if answer.finish_reason == "length":
        tokens = answer["usage"]["completion_tokens"]
        say(f"cut after {tokens:,} tokens; --max-tokens and --max-model-len say how many there may be")
