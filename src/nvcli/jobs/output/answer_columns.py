"""The types that an answer's keys have as columns of an Arrow table. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow

_LOGPROBS = pyarrow.struct(
    [
        ("tokens", pyarrow.list_(pyarrow.string())),
        ("token_logprobs", pyarrow.list_(pyarrow.float64())),
        ("top_logprobs", pyarrow.list_(pyarrow.map_(pyarrow.string(), pyarrow.float64()))),
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
    ]
)
ANSWER_TYPES = {
    "index": pyarrow.int64(),
    "choices": pyarrow.list_(_CHOICE),
    "usage": pyarrow.struct(
        [(name, pyarrow.int64()) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")]
    ),
    "error": pyarrow.struct([("type", pyarrow.string()), ("message", pyarrow.string())]),
}


def fit_choices(choices: Iterable[dict[str, Any]]) -> None:
    """Give the alternatives of log-probabilities the form that a column of maps takes."""
    for choice in choices:
        if choice.get("logprobs"):
            top = choice["logprobs"]["top_logprobs"]
            choice["logprobs"]["top_logprobs"] = [list(alternatives.items()) for alternatives in top]
