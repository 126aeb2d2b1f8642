"""How many prompt tokens a step computes while most slots decode.

A step reads the model's weights once, for its decode rows and its prompt tokens together. A prompt that is computed in
one large step takes that step's time for itself; spread over a few steps it makes use of weights that are read anyway,
and the matrix units work in every step. When many slots are empty, prompts are computed at once to fill them.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.state import RequestState

_NUM_STEPS = 8
"""Steps over which the prompt tokens that are due are spread."""
_TOKENS = 256
"""A step computes a multiple of so many prompt tokens, if it computes any; captured steps have such sizes, too."""
_EMPTY_SHARE = 16
"""Prompts are spread while at most one slot in so many does not decode."""


def prefill_budget(limits: SchedulerLimits, num_rows: int, num_decoding: int, due: Sequence[RequestState]) -> int:
    """Return the most prompt tokens of the next step, which has `num_rows` decode rows.

    `num_decoding` requests decode. `due` are the requests that are in the middle of their prompts and, if a slot is
    free, the one that waits first.
    """
    most = limits.max_num_batched_tokens - limits.decode_width * num_rows
    if not due or not limits.plans_admission or any(group.is_state for group in limits.kv_groups):
        return most  # a state is kept behind each chunk, so that smaller ones take more blocks
    if limits.max_num_seqs - num_decoding > limits.max_num_seqs // _EMPTY_SHARE:
        return most
    num_tokens = sum(state.num_uncomputed for state in due)
    return min(most, -(-num_tokens // (_NUM_STEPS * _TOKENS)) * _TOKENS)
