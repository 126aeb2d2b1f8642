"""ChatRenderer: conversations to prompt texts, in a process that can be ended when a chat template does not end.

Many conversations go to the process at a time. When they are not rendered within the limit of one conversation, or when
the process dies, a new process takes them one by one, so that the one at fault is known and the others are rendered.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from nvcli.errors import RowError
from nvcli.job_run.text.conversation import Conversation
from nvcli.job_run.text.guarded_process import GuardedProcess, NoAnswer
from nvcli.job_run.text.render_process import Rendered

MAX_SECONDS = 10.0
"""The most seconds for one conversation. Ordinary ones take well under a millisecond."""


class ChatRenderer:
    """Renders the chat template of one checkpoint. The process starts with the first conversation.

    Used by one thread; `close` may be called by any.
    """

    def __init__(self, model_path: Path, *, chat_template: str | None = None, max_seconds: float = MAX_SECONDS) -> None:
        """`chat_template` is the text of a template that takes the place of the checkpoint's own."""
        self.worker = GuardedProcess(
            "nvcli.job_run.text.render_process:main",
            (model_path, chat_template),
            name="chat template process",
            max_seconds=max_seconds,
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
            return [_error_of(answer)]
        return [text for conversation in conversations for text in self.render([conversation])]

    def close(self) -> None:
        """End the process, even while it renders. May be called again."""
        self.worker.close()


def _error_of(missing: NoAnswer) -> RowError:
    if not missing.reason:
        return RowError("aborted", "the run ends")
    return RowError("chat_template_error", f"the chat template cannot render `messages`: its process {missing.reason}")
