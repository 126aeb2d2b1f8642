"""How long the answers of running requests are, packed for the parent's estimate of the time left."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from nvcli.engine.state import RequestState
from nvcli.messages import pack

_MAX_LENGTHS = 512


def pack_lengths(running: Collection[RequestState]) -> bytes:
    """Return the lengths of running answers as `EngineStats.running_lengths` has them: of all requests where at most
    `_MAX_LENGTHS` run, else of every second one, or third, and so on."""
    stride = -(-len(running) // _MAX_LENGTHS) or 1
    states = islice(running, 0, None, stride)
    numbers = ((len(state.generated), state.request.max_tokens, state.num_prompt) for state in states)
    return pack([number for triple in numbers for number in triple])
