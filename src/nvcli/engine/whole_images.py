"""Chunks that cut no image, for models in which the tokens of an image attend to all of it."""

from __future__ import annotations

from nvcli.engine.state import RequestState


def whole_chunk(state: RequestState, length: int) -> int:
    """Return how many of a request's next `length` tokens a chunk may have: fewer where it would end inside an image
    that must not be cut, 0 if that is the first of them."""
    end = state.num_computed + length
    for image in state.request.images if state.keeps_images_whole else ():
        if image.first < end < image.end:
            return max(0, image.first - state.num_computed)
    return length


def least_chunk(state: RequestState) -> int:
    """Return the fewest tokens of a request's next chunk: one, or the rest of an image that must not be cut."""
    images = state.request.images if state.keeps_images_whole else ()
    ends = (image.end for image in images if image.first <= state.num_computed < image.end)
    return next(ends, state.num_computed + 1) - state.num_computed
