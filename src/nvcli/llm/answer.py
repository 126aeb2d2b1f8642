"""Answer: an output row, as a Python program gets it. Output: one of the row's answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from nvcli.errors import ConfigError, RowError
from nvcli.job.job import JobResult
from nvcli.job.rows.output_row import OutputForm, answer_of, pass_through


class Output:
    """One of a row's `n` answers: an item of `choices`, in either format, read through attributes."""

    def __init__(self, choice: Mapping[str, Any]) -> None:
        """`choice` is an item of `choices` of a generated output row."""
        self._choice = choice
        self._message: Mapping[str, Any] = choice.get("message") or choice

    @property
    def index(self) -> int:
        """Its position among the row's answers."""
        index: int = self._choice["index"]
        return index

    @property
    def text(self) -> str:
        """The text, without reasoning and tool calls if these are separate."""
        text: str | None = self._message.get("text" if self._message is self._choice else "content")
        return text or ""  # none if the answer consists of reasoning or tool calls alone, or a prompt was scored

    @property
    def reasoning_content(self) -> str | None:
        """The reasoning; None if there is none."""
        return self._message.get("reasoning_content")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The tool calls, in OpenAI's format; empty if there are none."""
        return self._message.get("tool_calls") or []

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended, such as `stop` or `length`; None if it was scored."""
        return self._choice.get("finish_reason")

    @property
    def logprobs(self) -> dict[str, Any] | None:
        """The log-probabilities of its tokens, in OpenAI's format; None unless `logprobs` was requested."""
        return self._choice.get("logprobs")

    @property
    def token_ids(self) -> list[int]:
        """The ids of its tokens. Raises AttributeError unless `return_token_ids` was requested."""
        ids: list[int] | None = self._choice.get("token_ids")
        if ids is None:
            raise AttributeError('no `token_ids`; request them with sampling_params={"return_token_ids": True}')
        return ids

    def __repr__(self) -> str:
        return f"Output({dict(self._choice)!r})"


class Answer(dict[str, Any]):
    """An output row: the same keys and values that `nvcli generate` writes (`docs/rows.md`).

    It is a dict, so it can be modified, pickled and dumped as JSON. Values passed through from the row are the same
    objects. The properties below read the dict, in nvcli's format and in OpenAI's.
    """

    prompt: str | None = None
    """The row's text, or its prompt; None if it was given as messages or token ids."""
    _index: int | None = None
    """The row's position in its call; None if the answer was made from another dict."""

    @property
    def index(self) -> int:
        """The row's position in its call, from 0."""
        index: int = self["index"] if self._index is None else self._index
        return index

    @property
    def error(self) -> RowError | None:
        """Why the row has no answer; None if it has one."""
        error = self.get("error")
        if error is None:
            return None
        return RowError(error.get("type") or error.get("code") or "unknown", error.get("message") or "")

    @property
    def outputs(self) -> list[Output]:
        """All `n` answers of the row. Raises the row's RowError if it failed."""
        if (error := self.error) is not None:
            raise error
        if "output" in self._body:
            return [_response_output(self._body)]
        if (choices := self._body.get("choices")) is None:
            raise AttributeError  # `__getattr__` names what embeddings have instead
        return [Output(choice) for choice in choices]

    @property
    def embedding(self) -> list[float]:
        """The row's embedding. Raises the row's RowError if it failed."""
        if (error := self.error) is not None:
            raise error
        data = self._body.get("data")
        vector: list[float] | None = self.get("embedding") if data is None else data[0]["embedding"]
        if vector is None:
            raise AttributeError  # `__getattr__` names what makes embeddings
        return vector

    @property
    def texts(self) -> list[str]:
        """The texts of all answers of the row. Raises the row's RowError if it failed."""
        return [output.text for output in self.outputs]

    @property
    def text(self) -> str:
        """The text of the row's first answer. Raises the row's RowError if it failed."""
        return self.outputs[0].text

    @property
    def reasoning_content(self) -> str | None:
        """The reasoning of the row's first answer; None if there is none or the row failed."""
        return None if self.error is not None else self.outputs[0].reasoning_content

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The first answer's tool calls, in OpenAI's format; empty if there are none or the row failed."""
        return [] if self.error is not None else self.outputs[0].tool_calls

    @property
    def finish_reason(self) -> str | None:
        """Why the first answer ended, such as `stop` or `length`; None if the row failed."""
        return None if self.error is not None else self.outputs[0].finish_reason

    @property
    def _body(self) -> Mapping[str, Any]:
        """The mapping with the answers: the body of an OpenAI response, or the row itself."""
        response = self.get("response")
        body: Mapping[str, Any] = self if response is None else response["body"]
        return body

    if not TYPE_CHECKING:  # which names what there is

        def __getattr__(self, name: str) -> Any:
            known = _KEYS_ELSEWHERE.get(name)
            if known is None and name in self:
                known = f'answer["{name}"]'
            raise AttributeError(f"an Answer has no attribute `{name}`{f'; use {known}' if known else ''}")

    def __missing__(self, key: Any) -> Any:
        if isinstance(key, int):  # as if it were a list of answers
            raise ConfigError(
                f"a single conversation or row has a single Answer: use it without [{key}], as in answer.text"
            )
        raise KeyError(key)


_KEYS_ELSEWHERE = {
    "request_id": 'answer["id"] or answer.index',
    "num_cached_tokens": 'answer["usage"]["cached_tokens"]',
    "prompt_token_ids": "transformers.AutoTokenizer, because answers do not contain prompt ids",
    "outputs": 'answer.embedding, or answer["classes"]',
    "embedding": 'llm.embed(rows) of an LLM made with task="embed"',
    "prompt_logprobs": 'sampling_params={"prompt_logprobs": 0}, and answer["prompt_logprobs"]',
}
"""Attributes of other engines' answers → what to use instead."""


def make_answer(result: JobResult, form: OutputForm, prompt: str | None = None) -> Answer:
    """Make the answer of a result. `prompt` is the text that the row asked with."""
    row = msgspec.to_builtins(answer_of(result, form))
    answer = Answer(pass_through(row, result.context))
    answer._index, answer.prompt = result.context.index, prompt
    return answer


def _response_output(body: Mapping[str, Any]) -> Output:
    """Return the answer of a /v1/responses row."""
    parts = {item["type"]: item["content"][0]["text"] for item in body["output"]}
    reason = "length" if body["status"] == "incomplete" else "stop"
    choice = {"index": 0, "text": parts["message"], "finish_reason": reason}
    return Output({**choice, "reasoning_content": parts.get("reasoning")})
