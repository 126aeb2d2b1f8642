"""Suspects: answers at which a process that makes masks has ended, and what becomes of them.

Whatever ended the process may have had nothing to do with the answers that it was at, so each of them gets another try,
alone. An answer at which a process ends twice has failed. If that was while its grammar was compiled, which is the same
for every answer, so have all answers by this grammar that begin later.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from hashlib import blake2b

from nvcli.runner.mask_messages import FollowGrammar

_MOST_ENDS = 2
"""The ends of processes at one answer after which it has failed."""
_MOST_CONDEMNED = 4096
"""Grammars that cannot be compiled and are known, those that were met last."""


class Suspects:
    """The suspects of one rank."""

    def __init__(self) -> None:
        self._num_ends: Counter[int] = Counter()
        """Of each row, how many processes have ended at its answer."""
        self._condemned: OrderedDict[bytes, None] = OrderedDict()

    def begin(self, row: int, grammar: str) -> FollowGrammar:
        """Return what a process is told of an answer that begins in a row, or begins anew."""
        num_ends = self._num_ends.get(row, 0)
        has_failed = num_ends >= _MOST_ENDS or (bool(self._condemned) and _digest(grammar) in self._condemned)
        return FollowGrammar(row, None if has_failed else grammar, is_suspect=num_ends > 0)

    def end(self, row: int) -> None:
        """Note that the answer in a row has ended, so that another one may have it."""
        self._num_ends.pop(row, None)

    def blame(self, rows: Collection[int], compiling: int, grammars: Mapping[int, str]) -> bool:
        """Note that a process ended at the answers in some rows, of which it began the one in the row `compiling`.

        `grammars` are those of all its answers by row. Returns whether it ended at none of those that may be at fault:
        others have ended since, or failed before.
        """
        known = [row for row in rows if row in grammars and self._num_ends[row] < _MOST_ENDS]
        self._num_ends.update(known)
        if compiling in known and self._num_ends[compiling] >= _MOST_ENDS:
            self._condemned[_digest(grammars[compiling])] = None
            if len(self._condemned) > _MOST_CONDEMNED:
                self._condemned.popitem(last=False)
        return not known


def _digest(grammar: str) -> bytes:
    return blake2b(grammar.encode(), digest_size=16).digest()
