"""Chunks that cut nothing whose tokens attend to each other: the images of a model, its prompts with images, or all of
its prompts."""

from __future__ import annotations

from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.request import Request
from nvcli.engine.state import RequestState


def whole_spans(request: Request, num_prompt: int, limits: SchedulerLimits) -> tuple[tuple[int, int], ...]:
    """Return the parts of a request that no chunk may cut, each with the positions of its first token and behind its
    last. `num_prompt`: the tokens of the prompt."""
    if limits.keeps_prompts_whole:
        return ((0, num_prompt),)
    return tuple(image.whole for image in request.images) if limits.whole_tokens else ()


def whole_chunk(state: RequestState, length: int) -> int:
    """Return how many of a request's next `length` tokens a chunk may have: fewer where it would end inside a part that
    must not be cut, 0 if that is the first of them."""
    end = state.num_computed + length
    for first, last in state.whole_spans:
        if first < end < last:
            return max(0, first - state.num_computed)
    return length


def least_chunk(state: RequestState) -> int:
    """Return the fewest tokens of a request's next chunk: one, or the rest of a part that must not be cut."""
    ends = (end for first, end in state.whole_spans if first <= state.num_computed < end)
    return next(ends, state.num_computed + 1) - state.num_computed
