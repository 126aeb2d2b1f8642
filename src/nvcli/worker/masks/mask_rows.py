"""MaskRowAllocator: assigns rows of the mask memory to answers, and with them the workers that build their masks.

A step's masks are ready when the slowest worker is done. Slow masks mostly come from a few grammars, so answers with
the same grammar are spread over the workers. Between equally loaded ones, an answer goes to a worker that has compiled
its grammar, unless that one has too many answers.

If a worker dies while working on an answer, the answer gets a second try, because the cause may have been something
else; after a second death it has failed. If the worker was compiling the grammar, which is the same for every answer,
later answers with that grammar fail as well.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, defaultdict
from hashlib import blake2b

from nvcli.worker.masks.mask_messages import FollowGrammar
from nvcli.worker.masks.mask_worker import MAX_COMPILED

_MOST_ABOVE_MEAN, _MOST_MORE = 1.25, 1
"""A worker has too many answers when it has more than the mean times the first plus the second."""
_MOST_ENDS = 2
"""Worker deaths after which an answer has failed."""
_MOST_CONDEMNED = 4096
"""The most recent grammars remembered as impossible to compile."""


def num_mask_rows(num_answers: int) -> int:
    """Return the number of rows for `num_answers`: a few more, so that there is a choice even when all answers
    run."""
    return num_answers + num_answers // 4


class MaskRowAllocator:
    """Rows 0 to `num_rows`; row r belongs to worker r modulo `num_workers`."""

    def __init__(self, num_rows: int, num_workers: int) -> None:
        self._num_workers = num_workers
        self._free = [list(range(worker, num_rows, num_workers)) for worker in range(num_workers)]
        """The free rows of each worker, as heaps. The lowest is taken, because all rows up to the last used one are
        copied."""
        self._num_answers = [0] * num_workers
        self._num_alike: dict[str, list[int]] = defaultdict(lambda: [0] * num_workers)
        """Grammar → the number of its running answers at each worker."""
        self._compiled: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(num_workers)]
        """The grammars that each worker used last."""
        self._grammar_of: dict[int, str] = {}
        """Row → grammar, for the rows in use."""
        self._num_ends: Counter[int] = Counter()
        """Row → worker deaths during its current answer."""
        self._condemned: OrderedDict[bytes, None] = OrderedDict()

    def take(self, grammar: str) -> FollowGrammar:
        """Assign a free row, of which there must be one, to an answer. Returns the message for its worker."""
        alike, loads = self._num_alike[grammar], self._num_answers
        most = sum(loads) / self._num_workers * _MOST_ABOVE_MEAN + _MOST_MORE
        _, _, _, _, worker = min(
            (alike[worker], loads[worker] > most, grammar not in self._compiled[worker], loads[worker], worker)
            for worker in range(self._num_workers)
            if self._free[worker]
        )
        alike[worker] += 1
        loads[worker] += 1
        row = heapq.heappop(self._free[worker])
        self._grammar_of[row] = grammar
        compiled = self._compiled[worker]
        compiled[grammar] = None
        compiled.move_to_end(grammar)
        if len(compiled) > MAX_COMPILED:
            compiled.popitem(last=False)
        return self._follow(row)

    def give_back(self, row: int) -> None:
        """Free the row of an answer that has ended."""
        worker, grammar = row % self._num_workers, self._grammar_of.pop(row)
        alike = self._num_alike[grammar]
        alike[worker] -= 1
        if not any(alike):
            del self._num_alike[grammar]
        self._num_answers[worker] -= 1
        self._num_ends.pop(row, None)
        heapq.heappush(self._free[worker], row)

    def begin_anew(self, worker: int, at_work: int) -> tuple[list[FollowGrammar], bool]:
        """Record that a worker died, with its `MaskTable.at_work`.

        Returns the messages that restart its answers at the replacement, and whether no answer was to blame: the worker
        was idle, or at an answer that has ended since or had failed before.
        """
        row = abs(at_work) - 1
        is_to_blame = row in self._grammar_of and self._num_ends[row] < _MOST_ENDS
        if is_to_blame:
            self._num_ends[row] += 1
            if at_work < 0 and self._num_ends[row] == _MOST_ENDS:
                self._condemned[_digest(self._grammar_of[row])] = None
                if len(self._condemned) > _MOST_CONDEMNED:
                    self._condemned.popitem(last=False)
        self._compiled[worker].clear()
        rows = [row for row in self._grammar_of if row % self._num_workers == worker]
        return [self._follow(row) for row in rows], not is_to_blame

    def _follow(self, row: int) -> FollowGrammar:
        grammar = self._grammar_of[row]
        has_failed = self._num_ends.get(row, 0) >= _MOST_ENDS or (
            bool(self._condemned) and _digest(grammar) in self._condemned
        )
        return FollowGrammar(row, None if has_failed else grammar)


def _digest(grammar: str) -> bytes:
    return blake2b(grammar.encode(), digest_size=16).digest()
