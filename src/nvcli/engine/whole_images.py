"""Chunks that cut no image, for models in which the tokens of an image attend to all of it; or no prompt with images,
for those in which all of its tokens attend to each other."""

from __future__ import annotations

from nvcli.engine.state import RequestState


def whole_chunk(state: RequestState, length: int) -> int:
    """Return how many of a request's next `length` tokens a chunk may have: fewer where it would end inside an image
    that must not be cut, 0 if that is the first of them."""
    end = state.num_computed + length
    for image in state.request.images if state.keeps_images_whole else ():
        first, last = image.whole
        if first < end < last:
            return max(0, first - state.num_computed)
    return length


def least_chunk(state: RequestState) -> int:
    """Return the fewest tokens of a request's next chunk: one, or the rest of an image that must not be cut."""
    images = state.request.images if state.keeps_images_whole else ()
    ends = (end for first, end in (image.whole for image in images) if first <= state.num_computed < end)
    return next(ends, state.num_computed + 1) - state.num_computed
