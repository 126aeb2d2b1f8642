"""Failures of requests, as reported in their rows, and the check whether the model itself is at fault."""

from __future__ import annotations

from typing import NamedTuple

from nvcli.core.messages import CONSTRAINT_FAILED, NO_ADAPTER, NOT_FINITE
from nvcli.engine.state import RequestState
from nvcli.errors import ModelError

MAX_BROKEN_PROMPTS = 16
"""The number of different prompts without a token, and none with one, after which the run ends. Rows that change logits
(`Request.changes_logits`) or have a LoRA adapter of their own do not count."""
_ALL_BROKEN = (
    f"the logits of all of the first {MAX_BROKEN_PROMPTS} prompts are NaN or infinite, so no row can be answered: the "
    "weights or the dtype are at fault. Compare the files of the checkpoint, and of an adapter for all rows (`lora`), "
    "with their source, or try another `dtype`: float16 can overflow with a model trained in bfloat16"
)


class Failure(NamedTuple):
    """The error type and message for a request's row."""

    type: str
    message: str
    is_tainted: bool = False
    """Whether the request's keys may be NaN too, so that none of them may be reused."""


class FirstPrompts:
    """Checks the first prompts: if none of them gets a token, the model is at fault."""

    def __init__(self) -> None:
        self._broken: set[bytes] = set()
        """Prompts whose logits were not finite."""

    def note(self, state: RequestState, failure: Failure) -> None:
        """Record that a request has failed before any prompt got a token."""
        request = state.request
        if failure.is_tainted and not request.changes_logits and request.adapter == NO_ADAPTER:
            self._broken.add(request.prompt_ids)

    def check(self) -> None:
        """Raise ModelError if many prompts, and only such prompts, had non-finite logits."""
        if len(self._broken) >= MAX_BROKEN_PROMPTS:
            raise ModelError(_ALL_BROKEN)


def of_token(token: int, state: RequestState) -> Failure:
    """Return the failure that a negative id, in place of a request's next token, stands for."""
    assert token in (NOT_FINITE, CONSTRAINT_FAILED)
    return _not_finite(state) if token == NOT_FINITE else _constraint_failed(state)


def too_large(num_tokens: int, most_tokens: int) -> Failure:
    """Make the failure of a request that needs `num_tokens` tokens; the whole KV cache holds `most_tokens` of one."""
    return Failure(
        "kv_cache_too_small",
        f"{num_tokens:,} tokens do not fit the KV cache, which holds {most_tokens:,} of one request; "
        "raise gpu_memory_utilization or kv_cache_memory, or lower max_tokens",
    )


def _not_finite(state: RequestState) -> Failure:
    """Make the failure of a request whose next token cannot be chosen."""
    request = state.request
    # Together they may forbid every token, whatever the logits are.
    if request.constraint is not None and request.sampling.allowed_token_ids is not None:
        return Failure(
            "invalid_structured",
            f"after token {state.num_tokens:,} (the prompt has {state.num_prompt:,}), `structured` or `tool_choice` "
            "permits none of the `allowed_token_ids` (or the logits are NaN or infinite); allow more tokens, including "
            "the model's end-of-sequence id, or leave one of the two out",
            is_tainted=True,
        )
    fault = "the weights may be damaged, or the dtype too narrow for the model"
    if request.adapter != NO_ADAPTER:
        fault = "the files of the row's adapter, or the weights, may be damaged, or the dtype too narrow for the model"
    return Failure(
        "non_finite_logits",
        f"the logits after token {state.num_tokens:,} (the prompt has {state.num_prompt:,}) are NaN or "
        f"infinite; {fault}",
        is_tainted=True,
    )


def _constraint_failed(state: RequestState) -> Failure:
    """Make the failure of an answer whose grammar cannot be followed any further."""
    return Failure(
        "structured_too_complex",
        f"after token {len(state.generated):,} of the answer, following the grammar takes more work or memory than "
        "allowed, or it nests too deeply; use a simpler `structured`",
    )
