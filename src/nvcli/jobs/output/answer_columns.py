"""The types that an answer's keys have as columns of an Arrow table. Needs pyarrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow

from nvcli.jobs.job import Usage
from nvcli.task_config import Task

_TOKEN = pyarrow.struct([("token", pyarrow.string()), ("logprob", pyarrow.float64())])
_LOGPROBS = pyarrow.struct(
    [
        ("tokens", pyarrow.list_(pyarrow.string())),
        ("token_logprobs", pyarrow.list_(pyarrow.float64())),
        ("top_logprobs", pyarrow.list_(pyarrow.list_(_TOKEN))),  # Hugging Face's datasets have no maps
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
_SCORED_CHOICE = pyarrow.struct(
    [
        ("index", pyarrow.int64()),
        ("text", pyarrow.string()),
        ("logprob", pyarrow.float64()),
        ("num_tokens", pyarrow.int64()),
        ("num_bytes", pyarrow.int64()),
        ("score", pyarrow.float64()),
        ("perplexity", pyarrow.float64()),
        ("is_greedy", pyarrow.bool_()),
        ("tokens", pyarrow.list_(pyarrow.string())),
        ("token_logprobs", pyarrow.list_(pyarrow.float64())),
    ]
)
_END_TYPES = {
    "usage": pyarrow.struct([(name, pyarrow.int64()) for name in Usage.__struct_fields__]),
    "error": pyarrow.struct([("type", pyarrow.string()), ("message", pyarrow.string())]),
}
ANSWER_TYPES = {"index": pyarrow.int64(), "choices": pyarrow.list_(_CHOICE), **_END_TYPES}
"""The columns of generated answers."""
_TASK_TYPES: dict[Task, dict[str, pyarrow.DataType]] = {
    "generate": {**ANSWER_TYPES, "prompt_logprobs": _LOGPROBS},
    "score": {
        "index": pyarrow.int64(),
        "choices": pyarrow.list_(_SCORED_CHOICE),
        "best": pyarrow.int64(),
        "correct": pyarrow.bool_(),
        **_END_TYPES,
    },
    "embed": {"index": pyarrow.int64(), "embedding": pyarrow.list_(pyarrow.float32()), **_END_TYPES},
}


def task_of(names: Sequence[str]) -> Task:
    """Return the task whose answer begins with these keys. Rows have the keys of the answer first, and columns of the
    input may have the same names."""
    own = names[2:4]
    return "embed" if "embedding" in own else "score" if "best" in own else "generate"


def own_types(task: Task, *, is_base64: bool) -> Mapping[str, pyarrow.DataType]:
    """Return the types of the columns that the answers of a task have. `is_base64`: embeddings are texts."""
    return {**_TASK_TYPES[task], "embedding": pyarrow.string()} if is_base64 else _TASK_TYPES[task]


def fit_row(row: dict[str, Any]) -> None:
    """Give the alternatives of log-probabilities in a row the form that its columns take."""
    for part in (*(choice.get("logprobs") for choice in row.get("choices", ())), row.get("prompt_logprobs")):
        if part:
            part["top_logprobs"] = [
                None if top is None else [{"token": token, "logprob": logprob} for token, logprob in top.items()]
                for top in part["top_logprobs"]
            ]


def json_alternatives(top: Sequence[Any] | None) -> dict[str, float | None] | None:
    """Return the alternatives of one token, as a table holds them, in the form that they have in JSON.

    In tables of earlier versions they are maps, which are read as pairs.
    """
    if top is None:
        return None
    return dict((each["token"], each["logprob"]) if isinstance(each, dict) else each for each in top)
