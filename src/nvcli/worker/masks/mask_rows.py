"""MaskRowAllocator: which rows of the memory of masks answers get, and so which process makes their masks.

The masks of a step are there when the slowest process is done. So answers by one grammar are spread over the processes:
slow masks are mostly those of few grammars. Among equals an answer goes to a process that has compiled its grammar,
unless that one has too many answers.

An answer at which its process ends gets another try, because the end may have had nothing to do with it. At the second
end the answer has failed. If that was while its grammar was compiled, which is the same for every answer, so have all
answers by this grammar that begin later.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, defaultdict
from hashlib import blake2b

from nvcli.worker.masks.mask_messages import FollowGrammar
from nvcli.worker.masks.mask_worker import MAX_COMPILED

_MOST_ABOVE_MEAN, _MOST_MORE = 1.25, 1
"""A process has too many answers above the mean times the one and plus the other."""
_MOST_ENDS = 2
"""The ends of processes at one answer after which it has failed."""
_MOST_CONDEMNED = 4096
"""Grammars that cannot be compiled and are known, those that were met last."""


def num_mask_rows(num_answers: int) -> int:
    """Return the rows to have for so many answers: some more, so that there is a choice where all answers run."""
    return num_answers + num_answers // 4


class MaskRowAllocator:
    """The rows 0 to `num_rows`, of which row r is served by process r modulo `num_workers`."""

    def __init__(self, num_rows: int, num_workers: int) -> None:
        self._num_workers = num_workers
        self._free = [list(range(worker, num_rows, num_workers)) for worker in range(num_workers)]
        """The free rows of each process, as heaps: the first are taken, because all up to the last one are copied."""
        self._num_answers = [0] * num_workers
        self._num_alike: dict[str, list[int]] = defaultdict(lambda: [0] * num_workers)
        """For each grammar that is followed, the answers of each process."""
        self._compiled: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(num_workers)]
        """The grammars that each process used last."""
        self._grammar_of: dict[int, str] = {}
        """The grammars of the rows that are taken."""
        self._num_ends: Counter[int] = Counter()
        """Row → processes that have ended at its answer."""
        self._condemned: OrderedDict[bytes, None] = OrderedDict()

    def take(self, grammar: str) -> FollowGrammar:
        """Give an answer a free row, of which there must be one. Returns what its process is told."""
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
        """Take back the row of an answer that has ended."""
        worker, grammar = row % self._num_workers, self._grammar_of.pop(row)
        alike = self._num_alike[grammar]
        alike[worker] -= 1
        if not any(alike):
            del self._num_alike[grammar]
        self._num_answers[worker] -= 1
        self._num_ends.pop(row, None)
        heapq.heappush(self._free[worker], row)

    def begin_anew(self, worker: int, at_work: int) -> tuple[list[FollowGrammar], bool]:
        """Note that a process ended, which was at `at_work` (`MaskTable.at_work`).

        Returns what the one in its place is told of its answers, and whether no answer was at fault: the process was at
        none, or at one that has ended since or failed before.
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
