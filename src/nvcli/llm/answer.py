"""Answer: an output row as a Python program gets it, and Output: one of the answers in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from nvcli.errors import ConfigError, RowError
from nvcli.job.job import JobResult
from nvcli.job.rows.output_row import OutputForm, answer_of, pass_through


class Output:
    """One of the answers of a row, which has `n`: what stands under `choices`, in either form, by attributes."""

    def __init__(self, choice: Mapping[str, Any]) -> None:
        """`choice` is an item of `choices` of an output row that was generated."""
        self._choice = choice
        self._message: Mapping[str, Any] = choice.get("message") or choice

    @property
    def index(self) -> int:
        """Its place among the answers of its row."""
        index: int = self._choice["index"]
        return index

    @property
    def text(self) -> str:
        """The text, without the thought and the tool calls where those are told apart."""
        text: str | None = self._message["text" if self._message is self._choice else "content"]
        return text or ""  # null where the answer is a thought or tool calls alone

    @property
    def reasoning_content(self) -> str | None:
        """The thought; None: it has none."""
        return self._message.get("reasoning_content")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The tools that it calls, in OpenAI's form; empty: none."""
        return self._message.get("tool_calls") or []

    @property
    def finish_reason(self) -> str:
        """The reason why it ended, such as `stop` or `length`."""
        reason: str = self._choice["finish_reason"]
        return reason

    @property
    def logprobs(self) -> dict[str, Any] | None:
        """The log-probabilities of its tokens, in OpenAI's form; None: `logprobs` was not asked for."""
        return self._choice.get("logprobs")

    @property
    def token_ids(self) -> list[int]:
        """The ids of its tokens. Raises AttributeError unless `return_token_ids` was asked for."""
        ids: list[int] | None = self._choice.get("token_ids")
        if ids is None:
            raise AttributeError('no `token_ids`; ask for them with sampling_params={"return_token_ids": True}')
        return ids

    def __repr__(self) -> str:
        return f"Output({dict(self._choice)!r})"


class Answer(dict[str, Any]):
    """An output row: the same keys and values that `nvcli generate` writes (`docs/rows.md`).

    Being a dict it can be changed, pickled and dumped as JSON. What the row passed through are the very objects that it
    held. The properties below read the dict, in the native form and in OpenAI's.
    """

    prompt: str | None = None
    """The text that the row was, or its prompt; None: it was given as messages or token ids."""
    _index: int | None = None
    """The place of the row in its call; None: the answer was made of another dict."""

    @property
    def index(self) -> int:
        """The place of the row in its call, from 0."""
        index: int = self["index"] if self._index is None else self._index
        return index

    @property
    def error(self) -> RowError | None:
        """The reason why the row has no answer; None: it has one."""
        error = self.get("error")
        if error is None:
            return None
        return RowError(error.get("type") or error.get("code") or "unknown", error.get("message") or "")

    @property
    def outputs(self) -> list[Output]:
        """All answers of the row, which has `n`. Raises the row's RowError if it has none."""
        if (error := self.error) is not None:
            raise error
        if "output" in self._body:
            return [_response_output(self._body)]
        if (choices := self._body.get("choices")) is None:
            raise AttributeError  # `__getattr__` says what an embedding has
        return [Output(choice) for choice in choices]

    @property
    def embedding(self) -> list[float]:
        """The row's embedding. Raises the row's RowError if it has none."""
        if (error := self.error) is not None:
            raise error
        data = self._body.get("data")
        vector: list[float] = self["embedding"] if data is None else data[0]["embedding"]
        return vector

    @property
    def texts(self) -> list[str]:
        """The texts of all answers of the row. Raises the row's RowError if it has none."""
        return [output.text for output in self.outputs]

    @property
    def text(self) -> str:
        """The text of the row's first answer. Raises the row's RowError if it has none."""
        return self.outputs[0].text

    @property
    def reasoning_content(self) -> str | None:
        """The thought of the row's first answer; None: it has none, or the row failed."""
        return None if self.error is not None else self.outputs[0].reasoning_content

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The tools that the first answer calls, in OpenAI's form; empty: none, or the row failed."""
        return [] if self.error is not None else self.outputs[0].tool_calls

    @property
    def finish_reason(self) -> str | None:
        """The reason why the first answer ended, such as `stop` or `length`; None: the row failed."""
        return None if self.error is not None else self.outputs[0].finish_reason

    @property
    def _body(self) -> Mapping[str, Any]:
        """The mapping that holds the answers: the body of OpenAI's response, or the row itself."""
        response = self.get("response")
        body: Mapping[str, Any] = self if response is None else response["body"]
        return body

    if not TYPE_CHECKING:  # which knows what there is

        def __getattr__(self, name: str) -> Any:
            known = _KEYS_ELSEWHERE.get(name)
            if known is None and name in self:
                known = f'answer["{name}"]'
            raise AttributeError(f"an Answer has no attribute `{name}`{f'; use {known}' if known else ''}")

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, int):  # as of a list of answers
            raise ConfigError(f"one conversation or row has one Answer: use it without [{key}], as in answer.text")
        raise KeyError(key)


_KEYS_ELSEWHERE = {
    "request_id": 'answer["id"] or answer.index',
    "num_cached_tokens": 'answer["usage"]["cached_tokens"]',
    "prompt_token_ids": "transformers.AutoTokenizer, as answers hold no ids of prompts",
    "outputs": "answer.embedding",
    "prompt_logprobs": 'sampling_params={"prompt_logprobs": 0}, and answer["prompt_logprobs"]',
}
"""Attributes of other engines' answers, and what to use."""


def make_answer(result: JobResult, form: OutputForm, prompt: str | None = None) -> Answer:
    """Make the answer of a result. `prompt` is the text that the row asked with."""
    row = msgspec.to_builtins(answer_of(result, form))
    answer = Answer(pass_through(row, result.context))
    answer._index, answer.prompt = result.context.index, prompt
    return answer


def _response_output(body: Mapping[str, Any]) -> Output:
    """Return the answer of a row for /v1/responses."""
    parts = {item["type"]: item["content"][0]["text"] for item in body["output"]}
    reason = "length" if body["status"] == "incomplete" else "stop"
    choice = {"index": 0, "text": parts["message"], "finish_reason": reason}
    return Output({**choice, "reasoning_content": parts.get("reasoning")})
