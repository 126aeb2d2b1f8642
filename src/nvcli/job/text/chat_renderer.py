"""ChatRenderer: renders conversations in a process that can be killed if a chat template does not end.

Many conversations go to the process at a time. When they are not rendered within the limit of one conversation, or when
the process dies, a new process takes them one by one, so that the one at fault is known and the others are rendered.
Once several have taken too long, the template is what is at fault, and conversations get a tenth of the time, once: a
file of them must not take hours. How much memory the process may take is limited too.
"""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from nvcli.core.system.host_memory import limit_more_memory
from nvcli.core.validation import describe_surrogate
from nvcli.errors import LoadError, RowError
from nvcli.job.text.guarded_process import PATIENCE, GuardedProcess, NoAnswer
from nvcli.job.text.tokenizer import Tokenizer

MAX_SECONDS = 10.0
"""Timeout of a conversation. Ordinary ones take well under a millisecond."""


class ChatRenderer:
    """Renders the chat template of a checkpoint. The process starts with the first conversation.

    Used by one thread; `close` may be called by any.
    """

    def __init__(self, model_path: Path, *, chat_template: str | None = None, max_seconds: float = MAX_SECONDS) -> None:
        """`chat_template` is the text of a template that replaces the checkpoint's own."""
        self.worker = GuardedProcess(
            "nvcli.job.text.chat_renderer:main",
            (model_path, chat_template),
            name="chat template process",
            max_seconds=max_seconds,
            patience=PATIENCE,
            env={"OPENBLAS_NUM_THREADS": "1"},  # numpy comes with transformers, and has nothing to do here
        )
        self._decode = msgspec.msgpack.Decoder(list[Rendered]).decode

    def render(self, conversations: Sequence[Conversation]) -> list[str | RowError]:
        """Return the prompt text of each conversation, or its error. Raises LoadError and WorkerError if no process can
        be started.

        Once it is closed, every conversation becomes an error.
        """
        if not conversations:
            return []
        answer = self.worker.ask(list(conversations), is_last=len(conversations) == 1)
        if not isinstance(answer, NoAnswer):
            return [
                RowError(each.error_type, each.error) if each.error_type else each.text for each in self._decode(answer)
            ]
        if len(conversations) == 1:
            if not answer.reason:
                return [RowError("aborted", "the run ends")]
            problem = f"the chat template cannot render `messages`: its process {answer.reason}"
            return [RowError("chat_template_error", problem)]
        return [text for conversation in conversations for text in self.render([conversation])]

    def close(self) -> None:
        """Kill the process, even while it renders. Idempotent."""
        self.worker.close()


class Conversation(msgspec.Struct, frozen=True):
    """The messages of a row, and the variables of its template."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any] = {}
    """Variables of the chat template by name (`chat_template_kwargs`)."""


MAX_CHARS = 512 * 1024 * 1024
"""Maximum length of a rendered conversation in characters, equal to that of an input line in bytes."""

_MAX_BYTES = 4 * 1024 * 1024 * 1024
"""Maximum memory of the process for rendering."""


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """A rendered conversation: its text, or the type and message of its error."""

    text: str
    error_type: str = ""
    error: str = ""


def main(model: tuple[Path, str | None], control: Connection) -> None:
    """Load a chat template, report that with an empty message, and render lists of conversations.

    `model` is the checkpoint's folder, and the text of a template that takes the place of the checkpoint's own.

    Where it cannot be loaded, the only message is the reason.
    """
    model_path, chat_template = model
    try:
        tokenizer = Tokenizer.load(model_path, chat_template=chat_template)
        if chat_template is None:  # or it was checked when it was read
            tokenizer.check_chat_template(model_path)
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
        return _render_error(f"it takes more than {_MAX_BYTES >> 30} GiB of memory")
    if len(text) > MAX_CHARS:
        return _render_error(f"it gave more than {MAX_CHARS:,} characters")
    surrogate = describe_surrogate(text)
    return Rendered(text) if surrogate is None else _render_error(f"its text cannot be used: {surrogate}")


def _render_error(reason: str) -> Rendered:
    return Rendered("", "chat_template_error", f"the chat template cannot render `messages`: {reason}")
