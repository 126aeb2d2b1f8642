"""The process that renders chat templates (`ChatRenderer`): conversations in, prompt texts or errors out.

A chat template is a program that comes with the checkpoint. It can go on for hours or fill the memory, and nothing but
the end of its process ends it for certain. How much memory it may take is limited here; the parent limits its time.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from nvcli.errors import LoadError, RowError
from nvcli.host_memory import limit_more_memory
from nvcli.job_run.text.conversation import Conversation
from nvcli.job_run.text.tokenizer import Tokenizer
from nvcli.validation import describe_surrogate

MAX_CHARS = 512 * 1024 * 1024
"""The most characters of a rendered conversation, as many as a line of the input may have bytes."""

_MAX_BYTES = 4 * 1024 * 1024 * 1024
"""The most memory that rendering may take."""


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """A rendered conversation: its text, or the type and message of its error."""

    text: str
    error_type: str = ""
    error: str = ""


def main(model: tuple[Path, str | None], control: Connection) -> None:
    """Load a chat template, say so with an empty message, and answer lists of conversations.

    `model` is the checkpoint's folder, and the text of a template that takes the place of the checkpoint's own.

    Where it cannot be loaded, the only message is the reason.
    """
    model_path, chat_template = model
    try:
        tokenizer = Tokenizer.load(model_path, chat_template=chat_template)
    except LoadError as error:
        control.send_bytes(str(error).encode())
        return
    limit_more_memory(_MAX_BYTES)
    encode = msgspec.msgpack.Encoder().encode
    control.send_bytes(b"")
    while True:
        conversations: list[Conversation] = control.recv()
        control.send_bytes(encode([_render(tokenizer, conversation) for conversation in conversations]))


def _render(tokenizer: Tokenizer, conversation: Conversation) -> Rendered:
    try:
        text = tokenizer.render(conversation.messages, conversation.variables)
    except RowError as error:
        return Rendered("", error.type, error.message.encode(errors="replace").decode())
    except MemoryError:
        return _refused(f"it takes more than {_MAX_BYTES >> 30} GiB of memory")
    if len(text) > MAX_CHARS:
        return _refused(f"it gave more than {MAX_CHARS:,} characters")
    surrogate = describe_surrogate(text)
    return Rendered(text) if surrogate is None else _refused(f"its text cannot be used: {surrogate}")


def _refused(reason: str) -> Rendered:
    return Rendered("", "chat_template_error", f"the chat template cannot render `messages`: {reason}")
