"""GraphChoice: which graph a step takes: the one that computes the fewest tokens, or for some time a captured one that
does more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from nvcli.attention.forward_batch import BatchShape

_USES_OF_OTHER = 64
"""Uses of a graph that does more than a step needs, before one is captured that does no more."""


class GraphChoice:
    """Chooses among the graphs of one rank."""

    def __init__(self, shapes: Sequence[BatchShape], has_captured: Callable[[BatchShape], bool]) -> None:
        """`shapes`: of all graphs; `has_captured`: whether the graph of a shape is captured."""
        self._has_captured = has_captured
        self._uncaptured: Counter[BatchShape] = Counter()
        """How often steps wanted a graph that is not captured."""
        self._smallest_first = sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_rows))

    def padded_shape(self, shape: BatchShape) -> BatchShape | None:
        """Return the shape of the graph that serves a batch; None if none does. For some time a captured graph serves
        instead of one that is not, if a head takes in prompts there that it need not take in, or drafts for up to twice
        as many rows: that costs less than capturing another."""
        found = next((candidate for candidate in self._smallest_first if candidate.holds(shape)), None)
        if found is None or self._has_captured(found) or not (found.prefill_rows or found.extends_drafts):
            return found
        self._uncaptured[found] += 1
        if self._uncaptured[found] >= _USES_OF_OTHER:
            return found
        if found.prefill_rows:
            extended = replace(found, extends_drafts=True)
            return extended if self._has_captured(extended) else found
        others = (other for other in self._smallest_first if other.holds(shape) and self._has_captured(other))
        return next((other for other in others if other.decode_rows <= 2 * found.decode_rows), found)
