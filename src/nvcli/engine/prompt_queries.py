"""PromptQueries: the part of a request's prompt still to be read, and the results so far.

A request may want the log-probabilities of tokens of its prompt, or a sum of hidden states (`PromptScoring`,
`Pooling`). Both are read at consecutive positions while the prompt is prefilled. The keys of those positions are
computed even if the prefix cache has them, because the cache holds no hidden states: a hit ends before the first unread
position. Nothing is read twice, even after a preemption.
"""

from __future__ import annotations

from array import array

from nvcli.core.messages import PromptQuery, PromptQueryResult
from nvcli.engine.request import Pooling, PromptScoring


class PromptQueries:
    """The queries of one request, in order of position."""

    __slots__ = ("_end", "_next", "_prompt", "_taken", "_wish")

    def __init__(self, wish: PromptScoring | Pooling, prompt: array[int]) -> None:
        """`prompt`: the ids of the prompt's tokens, which are not changed."""
        self._wish, self._prompt = wish, prompt
        num_prompt = len(prompt)
        if isinstance(wish, PromptScoring):
            # The token at a position is scored by the hidden state of the token before it.
            self._next, self._end = wish.first - 1, num_prompt - (wish.next_id is None)
        else:
            self._next = num_prompt - 1 if wish.position == "last" else 0
            self._end = 1 if wish.position == "first" else num_prompt
        self._taken: list[PromptQueryResult] = []

    @property
    def first_unread(self) -> int | None:
        """The first position that no submitted step reads, whose token must be computed; None if all are read."""
        return self._next if self._next < self._end else None

    def read_chunk(self, row: int, start: int, end: int) -> PromptQuery | None:
        """Return the query for a prefill chunk, and count its positions as read; None if there is nothing to read.

        row: the row of the chunk in the batch; start, end: the positions of its tokens, without `end`.
        """
        first, end = max(self._next, start), min(self._end, end)
        if first >= end:
            return None
        self._next = end
        wish, prompt = self._wish, self._prompt
        if not isinstance(wish, PromptScoring):
            return PromptQuery(row=row, start=first - start, count=end - first)
        targets = prompt[first + 1 : end + 1]
        if end == len(prompt):
            assert wish.next_id is not None
            targets.append(wish.next_id)
        return PromptQuery(
            row=row, start=first - start, count=end - first, targets=targets.tobytes(), num_top=wish.num_top
        )

    def put_back(self, count: int) -> None:
        """Return the last `count` positions to the unread ones, because the step that was to read them did not run."""
        self._next -= count

    def take(self, result: PromptQueryResult) -> None:
        """Record a step's result."""
        self._taken.append(result)

    def report(self) -> list[PromptQueryResult]:
        """Return the results since the last call."""
        taken, self._taken = self._taken, []
        return taken
