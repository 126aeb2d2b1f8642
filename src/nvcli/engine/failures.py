"""Failures of requests in the engine, as their rows say them, and the case in which the model is at fault for all."""

from __future__ import annotations

from typing import NamedTuple

from nvcli.engine.state import RequestState
from nvcli.errors import ModelError
from nvcli.messages import CONSTRAINT_FAILED, NOT_FINITE

MAX_BROKEN_PROMPTS = 16
"""The run ends where so many different prompts got no token and no prompt got one. Rows that change logits
(`Request.changes_logits`) do not count."""
_ALL_BROKEN = (
    f"the logits of all of the first {MAX_BROKEN_PROMPTS} prompts are NaN or infinite, so that no row can be "
    "answered: the weights or the dtype are at fault. Compare the checkpoint's files with their source, or try another "
    "`dtype`: float16 overflows where a model was trained in bfloat16"
)


class Failure(NamedTuple):
    """The type and the message of a request's error."""

    type: str
    message: str
    is_tainted: bool = False
    """Whether the keys that were computed for the request may be NaN too, so that none of them may be used again."""


class FirstPrompts:
    """Whether the first prompts get tokens, or the model is at fault."""

    def __init__(self) -> None:
        self._broken: set[bytes] = set()
        """Prompts whose logits were not finite."""

    def note(self, state: RequestState, failure: Failure) -> None:
        """Note that a request has failed before any got a token."""
        if failure.is_tainted and not state.request.changes_logits:
            self._broken.add(state.request.prompt_ids)

    def check(self) -> None:
        """Raise ModelError where many prompts, and nothing but these, have had logits that are not finite."""
        if len(self._broken) >= MAX_BROKEN_PROMPTS:
            raise ModelError(_ALL_BROKEN)


def of_token(token: int, state: RequestState) -> Failure:
    """Return the failure that a negative id stands for, in the place of a request's next token."""
    assert token in (NOT_FINITE, CONSTRAINT_FAILED)
    return _not_finite(state) if token == NOT_FINITE else _constraint_failed(state)


def too_large(num_tokens: int, capacity: int) -> Failure:
    """A request needs `num_tokens` tokens, and the whole KV cache holds `capacity`."""
    return Failure(
        "kv_cache_too_small",
        f"{num_tokens} tokens do not fit the KV cache, which holds {capacity}; "
        "raise gpu_memory_utilization or kv_cache_memory, or lower max_tokens",
    )


def _not_finite(state: RequestState) -> Failure:
    """No token can be chosen behind the last one that is known."""
    request = state.request
    # Together they may forbid every token, whatever the logits are.
    if request.constraint is not None and request.sampling.allowed_token_ids is not None:
        return Failure(
            "invalid_structured",
            f"behind token {state.num_tokens:,} (the prompt has {state.num_prompt:,}), none of `allowed_token_ids` is "
            "a token with which the answer can go on as `structured` or `tool_choice` asks (or the logits are NaN or "
            "infinite); allow more tokens, the model's end-of-sequence id among them, or leave one of the two out",
            is_tainted=True,
        )
    return Failure(
        "non_finite_logits",
        f"the logits behind token {state.num_tokens:,} (the prompt has {state.num_prompt:,}) are NaN or "
        "infinite; the weights may be damaged, or the dtype too narrow for the model",
        is_tainted=True,
    )


def _constraint_failed(state: RequestState) -> Failure:
    """The grammar of an answer cannot be followed behind its last known token."""
    return Failure(
        "structured_too_complex",
        f"behind token {len(state.generated):,} of the answer, what may follow takes more work or memory than a "
        "grammar may take, or nests too deep; ask for a simpler `structured`",
    )
