"""Answer: an output row as a Python program gets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from nvcli.errors import RowError
from nvcli.jobs.job import JobResult
from nvcli.jobs.rows.output_row import OutputForm, answer_of, pass_through


class Answer(dict[str, Any]):
    """An output row: the same keys and values that `nvcli generate` writes (`jobs/README.md`).

    Being a dict it can be changed, pickled and dumped as JSON. What the row passed through are the very objects that it
    held. The properties below read the dict, in the native form and in OpenAI's.
    """

    @property
    def error(self) -> RowError | None:
        """The reason why the row has no answer; None: it has one."""
        error = self.get("error")
        if error is None:
            return None
        return RowError(error.get("type") or error.get("code") or "unknown", error.get("message") or "")

    @property
    def texts(self) -> list[str]:
        """The texts of all answers of the row, which has `n`. Raises the row's RowError if it has none."""
        if (error := self.error) is not None:
            raise error
        return [_text_of(choice) for choice in self._choices]

    @property
    def text(self) -> str:
        """The text of the row's first answer. Raises the row's RowError if it has none."""
        return self.texts[0]

    @property
    def reasoning_content(self) -> str | None:
        """The thought of the row's first answer; None: it has none, or the row failed."""
        return None if self.error is not None else self._message.get("reasoning_content")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The tools that the first answer calls, in OpenAI's form; empty: none, or the row failed."""
        return [] if self.error is not None else self._message.get("tool_calls") or []

    @property
    def finish_reason(self) -> str | None:
        """The reason why the first answer ended, such as `stop` or `length`; None: the row failed."""
        return None if self.error is not None else self._choices[0]["finish_reason"]

    @property
    def _message(self) -> dict[str, Any]:
        """What holds the parts of the first answer."""
        choice = self._choices[0]
        message: dict[str, Any] = choice.get("message") or choice
        return message

    @property
    def _choices(self) -> list[dict[str, Any]]:
        response = self.get("response")
        choices: list[dict[str, Any]] = self["choices"] if response is None else response["body"]["choices"]
        return choices


def make_answer(result: JobResult, form: OutputForm) -> Answer:
    """Make the answer of a result."""
    row = msgspec.to_builtins(answer_of(result, form))
    return Answer(pass_through(row, result.place))


def _text_of(choice: Mapping[str, Any]) -> str:
    message = choice.get("message")
    text: str | None = choice["text"] if message is None else message["content"]
    return text or ""  # null where the answer is a thought or tool calls alone
