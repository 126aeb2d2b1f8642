"""ChatRenderer: conversations to prompt texts, in a process that can be ended when a chat template does not end.

Many conversations go to the process at a time. When they are not rendered within the limit of one conversation, or when
the process dies, a new process takes them one by one, so that the one at fault is known and the others are rendered.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from nvcli.errors import LoadError, RowError, WorkerError
from nvcli.executor.child_process import ChildProcess
from nvcli.job_run.text.conversation import Conversation
from nvcli.job_run.text.render_process import Rendered

MAX_SECONDS = 10.0
"""The most seconds for one conversation. Ordinary ones take well under a millisecond."""

_WAIT_SECONDS = 0.25


class ChatRenderer:
    """Renders the chat template of one checkpoint. The process starts with the first conversation.

    Used by one thread; `close` may be called by any.
    """

    def __init__(self, model_path: Path, *, chat_template: str | None = None, max_seconds: float = MAX_SECONDS) -> None:
        """`chat_template` is the text of a template that takes the place of the checkpoint's own."""
        self._model_path = model_path
        self._chat_template = chat_template
        self._max_seconds = max_seconds
        self._process: ChildProcess | None = None
        self._decode = msgspec.msgpack.Decoder(list[Rendered]).decode
        self._lock = threading.Lock()
        """Held while the process is used."""
        self._closed = False

    def render(self, conversations: Sequence[Conversation]) -> list[str | RowError]:
        """Return the prompt text of each conversation, or its error. Raises LoadError and WorkerError if no process can
        be started.

        Once it is closed, every conversation becomes an error.
        """
        if not conversations:
            return []
        with self._lock:
            result = self._try(conversations)
        if not isinstance(result, RowError):
            return result
        if len(conversations) == 1:
            return [result]
        return [text for conversation in conversations for text in self.render([conversation])]

    def close(self) -> None:
        """End the process, even while it renders. May be called again."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()  # so that whoever waits for it lets go of the lock
        with self._lock:
            self._drop()

    def _try(self, conversations: Sequence[Conversation]) -> list[str | RowError] | RowError:
        """Render all conversations. Returns one RowError if they take too long, or the process dies twice at them."""
        reason = ""
        for _ in range(2):  # somebody may have killed it, who had nothing against these conversations
            if self._closed:
                return RowError("aborted", "the run ends")
            process = self._process or self._start()
            try:
                process.control.send(list(conversations))
                if self._wait(process, self._max_seconds):
                    rendered = self._decode(process.control.recv_bytes())
                    return [
                        RowError(each.error_type, each.error) if each.error_type else each.text for each in rendered
                    ]
                reason = f"is not done with `messages` after {self._max_seconds:g} seconds"
                break
            except (EOFError, OSError):
                if not self._closed:
                    reason = f"cannot render `messages`: its process {process.describe_exit()}"
                self._drop()
        self._drop()
        return RowError("chat_template_error", f"the chat template {reason}")

    def _start(self) -> ChildProcess:
        """Start the process, and wait until it has loaded the template, however long that takes."""
        process = self._process = ChildProcess(
            "nvcli.job_run.text.render_process:main",
            (self._model_path, self._chat_template),
            name="chat template process",
            env={"OPENBLAS_NUM_THREADS": "1"},  # numpy comes with transformers, and has nothing to do here
        )
        try:
            while not self._wait(process, _WAIT_SECONDS):
                pass
            problem = process.control.recv_bytes().decode()
        except (EOFError, OSError):
            if not self._closed:
                raise WorkerError(f"the {process.name} {process.describe_exit()} at its start") from None
        else:
            if problem:
                raise LoadError(problem)
        return process

    def _wait(self, process: ChildProcess, seconds: float) -> bool:
        """Wait for an answer or the end of the process; return whether there is one. Raises EOFError once it is closed.

        Waits are counted, not timed, so that a run that was stopped (Ctrl-Z) goes on where it was.
        """
        for _ in range(max(1, round(seconds / _WAIT_SECONDS))):
            if self._closed:
                raise EOFError
            if process.control.poll(_WAIT_SECONDS):
                return True
        return False

    def _drop(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
