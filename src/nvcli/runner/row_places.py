"""RowPlaces: which rows of the memory of masks answers get, and so which process makes their masks.

The masks of a step are there when the slowest process is done. So answers by one grammar are spread over the processes:
slow masks are mostly those of few grammars, and answers that share what was compiled wait for each other. Among equals
an answer goes to a process that has compiled its grammar, unless that one has too many answers.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, defaultdict

from nvcli.runner.compiled_grammars import MAX_COMPILED

_MOST_ABOVE_MEAN, _MOST_MORE = 1.25, 1
"""A process has too many answers above the mean times the one and plus the other."""


def num_places(num_answers: int) -> int:
    """Return the rows to have for so many answers: some more, so that there is a choice where all answers run."""
    return num_answers + num_answers // 4


class RowPlaces:
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

    def take(self, grammar: str) -> int:
        """Return a free row for an answer; there must be one."""
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
        return row

    def grammars_of(self, worker: int) -> dict[int, str]:
        """Return the rows of a process that are taken, and their grammars. What it has compiled is forgotten."""
        self._compiled[worker].clear()
        return {row: grammar for row, grammar in self._grammar_of.items() if row % self._num_workers == worker}

    def give_back(self, row: int) -> None:
        """Take back the row of an answer that has ended."""
        worker, grammar = row % self._num_workers, self._grammar_of.pop(row)
        alike = self._num_alike[grammar]
        alike[worker] -= 1
        if not any(alike):
            del self._num_alike[grammar]
        self._num_answers[worker] -= 1
        heapq.heappush(self._free[worker], row)
