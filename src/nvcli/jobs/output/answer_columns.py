"""The types that an answer's keys have as columns of an Arrow table. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow

from nvcli.jobs.job import Usage

_LOGPROBS = pyarrow.struct(
    [
        ("tokens", pyarrow.list_(pyarrow.string())),
        ("token_logprobs", pyarrow.list_(pyarrow.float64())),
        ("top_logprobs", pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.float64()))),
    ]
)
_TOOL_CALL = pyarrow.struct(
    [
        ("id", pyarrow.string()),
        ("type", pyarrow.string()),
        ("function", pyarrow.struct([("name", pyarrow.string()), ("arguments", pyarrow.string())])),
    ]
)
_CHOICE = pyarrow.struct(
    [
        ("index", pyarrow.int64()),
        ("text", pyarrow.string()),
        ("finish_reason", pyarrow.string()),
        ("token_ids", pyarrow.list_(pyarrow.int32())),
        ("logprobs", _LOGPROBS),
        ("score", pyarrow.float64()),
        ("reasoning_content", pyarrow.string()),
        ("tool_calls", pyarrow.list_(_TOOL_CALL)),
        ("tool_call_error", pyarrow.string()),
    ]
)
ANSWER_TYPES = {
    "index": pyarrow.int64(),
    "choices": pyarrow.list_(_CHOICE),
    "usage": pyarrow.struct([(name, pyarrow.int64()) for name in Usage.__struct_fields__]),
    "error": pyarrow.struct([("type", pyarrow.string()), ("message", pyarrow.string())]),
}


def fit_choices(choices: Iterable[dict[str, Any]]) -> None:
    """Give the alternatives of log-probabilities the form that a column of maps takes."""
    for choice in choices:
        if choice.get("logprobs"):
            top = choice["logprobs"]["top_logprobs"]
            choice["logprobs"]["top_logprobs"] = [list(alternatives.items()) for alternatives in top]
