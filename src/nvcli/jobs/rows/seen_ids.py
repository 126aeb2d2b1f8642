"""The set of row ids that were taken, in little memory."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right

from nvcli.hash_set import HashSet
from nvcli.jobs.job import JobId

_MASK = (1 << 64) - 1
_NAME = re.compile(r"row-(0|[1-9][0-9]{0,17})")
"""The form of the names that rows without an id get."""


class SeenIds:
    """A set of ids that costs nothing for rows without ids of their own, and 11 to 22 bytes for others.

    Ids are kept as 64-bit hashes, with a random key in each process: ten million different ids have a chance of three
    in a million that two are taken for one. The names of rows without an id are kept as ranges of their indices.
    """

    def __init__(self) -> None:
        self._hashes = HashSet()
        self._has_names = False
        """Whether a row brought an id that has the form of a name."""
        self._range_starts = array("q")
        self._range_ends = array("q")

    def add(self, row_id: JobId) -> bool:
        """Take an id that a row brought; False if it was taken already."""
        if isinstance(row_id, str):
            if row_id.startswith("row-"):
                self._has_names = True
                name = _NAME.fullmatch(row_id)
                if name is not None and self._is_named(int(name[1])):
                    return False
            return self._hashes.add(hash(row_id) & _MASK)
        # The number's text is hashed: hashes of numbers are alike for -1 and -2, and for numbers 2⁶¹ - 1 apart. It is
        # hashed in a tuple, because the text alone may be the id of another row.
        return self._hashes.add(hash((str(row_id), "id")) & _MASK)

    def name(self, index: int) -> str:
        """Return an id for a row that brought none, and take it: `row-7`, or `row-7-2` where an earlier row has that.

        Indices come in ascending order.
        """
        name = f"row-{index}"
        if self._has_names and (hash(name) & _MASK) in self._hashes:
            number = 2
            while not self._hashes.add(hash(f"{name}-{number}") & _MASK):
                number += 1
            return f"{name}-{number}"
        if self._range_ends and self._range_ends[-1] == index:
            self._range_ends[-1] = index + 1
        else:
            self._range_starts.append(index)
            self._range_ends.append(index + 1)
        return name

    def _is_named(self, index: int) -> bool:
        at = bisect_right(self._range_starts, index) - 1
        return at >= 0 and index < self._range_ends[at]
