"""Makes output rows in the form of OpenAI's batch files.

The form is that of platform.openai.com/docs/api-reference/batch/request-output. Every value follows from the row, its
answer and the job: a job that was interrupted and continued gives the same rows as one that was not.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import msgspec
from msgspec import structs

from nvcli.job.job import (
    RETRYABLE_ERRORS,
    Choice,
    EmbedAnswer,
    EmbedAnswers,
    ErrorInfo,
    JobResult,
    Logprobs,
    RowForm,
    Usage,
)
from nvcli.job.rows.openai_responses import response_body

BATCH_ID = "batch_req_"
"""Prefix of an output row's id, followed by the row's index."""

_OURS = RETRYABLE_ERRORS | {"tokenizer_error"}
"""Error types that are not the request's fault: status 500 instead of 400."""


def openai_row(result: JobResult, *, created: int, model: str) -> dict[str, Any]:
    """Return the row of a result; `created` and `model` are those of its objects."""
    index, error = result.context.index, result.error
    if error is None:
        status, body = 200, _body(result, created, model)
    else:
        status, body = 500 if error.type in _OURS else 400, {"error": _error_object(error)}
    if result.prompt_logprobs is not None:
        body["prompt_logprobs"] = result.prompt_logprobs
    return {
        "id": f"{BATCH_ID}{index}",
        "custom_id": result.context.id,
        "response": {"status_code": status, "request_id": f"req_{index}", "body": body},
        "error": None if error is None else {"code": error.type, "message": error.message},
    }


def _body(result: JobResult, created: int, model: str) -> dict[str, Any]:
    """Return the body of the response to an answered row."""
    form, index = result.context.form, result.context.index
    if form is RowForm.OPENAI_EMBEDDING:
        return _embeddings(result, model)
    if form is RowForm.RESPONSE:
        (choice,) = result.choices
        logprobs = None if choice.logprobs is None else _chat_logprobs(choice.logprobs)["content"]
        return response_body(result, logprobs, created=created, model=model)
    is_chat = form is RowForm.CHAT
    return {
        "id": f"chatcmpl-{index}" if is_chat else f"cmpl-{index}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [*map(_chat_choice if is_chat else _completion_choice, result.choices)],
        "usage": _usage(result.usage),
    }


def _embeddings(result: JobResult, model: str) -> dict[str, Any]:
    assert isinstance(result.answer, EmbedAnswer | EmbedAnswers)
    vectors = result.answer.vectors if isinstance(result.answer, EmbedAnswers) else [result.answer]
    data = [
        {"object": "embedding", "index": number, "embedding": vector.embedding} for number, vector in enumerate(vectors)
    ]
    tokens = result.usage.prompt_tokens
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}


def _error_object(error: ErrorInfo) -> dict[str, Any]:
    kind = "server_error" if error.type in _OURS else "invalid_request_error"
    return {"message": error.message, "type": kind, "param": None, "code": error.type}


def _usage(usage: Usage) -> dict[str, Any]:
    details: dict[str, Any] = {}
    if usage.reasoning_tokens is not msgspec.UNSET:
        details["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **details,
    }


def _chat_choice(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if not choice.text and (choice.reasoning_content is not None or choice.tool_calls):
        message["content"] = None
    if choice.reasoning_content is not None:
        message["reasoning_content"] = choice.reasoning_content
    if choice.tool_calls:
        message["tool_calls"] = choice.tool_calls
    if choice.tool_call_error is not None:
        message["tool_call_error"] = choice.tool_call_error
    return {
        "index": choice.index,
        "message": message,
        "logprobs": None if choice.logprobs is None else _chat_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
    }


def _chat_logprobs(logprobs: Logprobs) -> dict[str, Any]:
    tokens = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    content = [
        {**_token(text, logprob), "top_logprobs": [_token(*alternative) for alternative in (top or {}).items()]}
        for text, logprob, top in tokens
    ]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}


def _completion_choice(choice: Choice) -> dict[str, Any]:
    logprobs = choice.logprobs
    thought = {} if choice.reasoning_content is None else {"reasoning_content": choice.reasoning_content}
    return {
        "index": choice.index,
        "text": choice.text,
        **thought,  # of a prompt that became the message of a user
        "logprobs": logprobs and {**structs.asdict(logprobs), "text_offset": _offsets(logprobs.tokens)},
        "finish_reason": choice.finish_reason,
    }


def _offsets(tokens: list[str]) -> list[int]:
    """Return the offset of each token in the text."""
    return [*accumulate(map(len, tokens[:-1]), initial=0)] if tokens else []
