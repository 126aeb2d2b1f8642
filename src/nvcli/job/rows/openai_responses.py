"""Rows of OpenAI batch files for /v1/responses, as far as they are plain text: requests to chat requests, answers back.

The forms are those of platform.openai.com/docs/api-reference/responses. Whatever is more than text in and text out
(tools, earlier responses, images) is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from nvcli.core.validation import convert, is_integer, show
from nvcli.errors import RowError
from nvcli.job.job import Choice, JobResult
from nvcli.job.rows.openai_structured import unsupported_key, unsupported_value

_SAME = (
    *("model", "temperature", "top_p", "user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention"),
    *("parallel_tool_calls", "stream", "stream_options", "tools", "tool_choice"),
    # vLLM's additions:
    *("top_k", "min_p", "seed", "stop", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "ignore_eos", "logit_bias", "skip_special_tokens", "chat_template_kwargs"),
)
"""Parameters with the same name in chat requests."""
_OWN = ("input", "instructions", "max_output_tokens", "text", "reasoning", "top_logprobs", "include")
_HARMLESS: dict[str, tuple[Any, ...]] = {"background": (False,), "truncation": ("disabled",), "max_tool_calls": ()}
_INCLUDED_LOGPROBS = "message.output_text.logprobs"


def chat_body(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of the equivalent chat request. `given` has no nulls. Raises RowError and InvalidValue."""
    for key, value in given.items():
        if key in ("tools", "tool_choice") and value not in ([], "auto", "none"):
            raise _unsupported(
                f"`body.{key}` is {show(value)}: /v1/responses are answered with text alone here, and "
                "/v1/chat/completions with calls of tools too"
            )
        if key in _HARMLESS and value not in _HARMLESS[key]:
            raise unsupported_value(key, value)
        if key not in (*_SAME, *_OWN, *_HARMLESS):
            raise unsupported_key(key, (*_OWN, *_SAME))
    body = {key: given[key] for key in _SAME if key in given and key not in ("tools", "tool_choice")}
    body["messages"] = _messages(given)
    if "max_output_tokens" in given:
        most = given["max_output_tokens"]
        if not is_integer(most, 1):
            raise RowError("invalid_sampling", f"`body.max_output_tokens` is {show(most)}; allowed: an integer from 1")
        body["max_tokens"] = most
    body |= _text_options(given.get("text", {})) | _reasoning(given.get("reasoning", {}))
    include = given.get("include", [])
    if not isinstance(include, list) or any(each != _INCLUDED_LOGPROBS for each in include):
        raise _unsupported(f"`body.include` is {show(include)}; allowed: a list with {show(_INCLUDED_LOGPROBS)}")
    if include or given.get("top_logprobs"):
        body |= {"logprobs": True, "top_logprobs": given.get("top_logprobs", 0)}
    return body


def _messages(given: Mapping[str, Any]) -> list[Any]:
    if "input" not in given:
        raise RowError("missing_prompt", "`body.input` is not given")
    value = given["input"]
    if not isinstance(value, str | list):
        raise RowError("invalid_value", f"`body.input` is {show(value)}; allowed: text or a list of messages")
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else []
    for number, item in enumerate(value if isinstance(value, list) else ()):
        messages.append(_message(item, f"body.input[{number}]"))
    if "instructions" in given:
        text = convert(given["instructions"], str, under=("body", "instructions"))
        messages.insert(0, {"role": "system", "content": text})
    return messages


def _message(item: Any, name: str) -> Any:
    """Return an item of the input as a message, whose role and content are checked later."""
    if not isinstance(item, dict):
        raise RowError("invalid_value", f"`{name}` is {show(item)}; allowed: a message with `role` and `content`")
    if item.get("type", "message") != "message":
        raise RowError(
            "unsupported_content", f"`{name}` is an item of the type {show(item['type'])}; allowed: messages of text"
        )
    return {"role": item.get("role"), "content": item.get("content")}


def _text_options(text: Any) -> dict[str, Any]:
    is_known = isinstance(text, dict) and text.keys() <= {"format", "verbosity"}
    if is_known and text.get("verbosity") not in (None, "medium"):
        raise unsupported_value("text.verbosity", text["verbosity"])
    form = text.get("format") if is_known else False
    if not isinstance(form, dict | None):
        raise _unsupported(f"`body.text` is {show(text)}; allowed: an object with `format`")
    if form is None or form.get("type") == "text":
        return {}
    return {"response_format": form}


def _reasoning(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or any(key not in ("effort", "summary") for key in value):
        raise _unsupported(f"`body.reasoning` is {show(value)}; allowed: an object with `effort`")
    if value.get("summary") not in (None, "auto"):
        raise _unsupported(
            f"`body.reasoning.summary` is {show(value['summary'])}: thoughts are always returned in full; leave it out"
        )
    return {} if value.get("effort") is None else {"reasoning_effort": value["effort"]}


def _unsupported(message: str) -> RowError:
    return RowError("unsupported_parameter", message)


def response_body(result: JobResult, logprobs: Sequence[Any] | None, *, created: int, model: str) -> dict[str, Any]:
    """Return the response of an answered row. `logprobs` are those of its tokens in the form of chats; None: none."""
    index = result.context.index
    (choice,) = result.choices
    is_complete = choice.finish_reason != "length"
    status = "completed" if is_complete else "incomplete"
    usage = result.usage
    thought = 0 if usage.reasoning_tokens is msgspec.UNSET else usage.reasoning_tokens
    return {
        "id": f"resp-{index}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None if is_complete else {"reason": "max_output_tokens"},
        "model": model,
        "output": _output(choice, index, status, list(logprobs or ())),
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def _output(choice: Choice, index: int, status: str, logprobs: list[Any]) -> list[dict[str, Any]]:
    said: dict[str, Any] = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": logprobs}
    message = {"type": "message", "id": f"msg-{index}", "status": status, "role": "assistant", "content": [said]}
    if choice.reasoning_content is None:
        return [message]
    thought = {"type": "reasoning_text", "text": choice.reasoning_content}
    return [{"type": "reasoning", "id": f"rs-{index}", "summary": [], "content": [thought]}, message]
