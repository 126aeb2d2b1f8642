"""Sets of row numbers, one bit a row: the rows that an output answers already."""

from __future__ import annotations


class RowSet:
    """A set of row numbers from 0 that takes one bit for each number up to the largest."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self.count = 0

    def add(self, index: int) -> bool:
        """Add a number. Returns False if it was in the set before."""
        byte, bit = index >> 3, 1 << (index & 7)
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        if self._bits[byte] & bit:
            return False
        self._bits[byte] |= bit
        self.count += 1
        return True

    def __contains__(self, index: int) -> bool:
        byte = index >> 3
        return byte < len(self._bits) and bool(self._bits[byte] & 1 << (index & 7))

    def minus(self, other: RowSet) -> RowSet:
        """Return this set without the numbers of `other`, which must all be in it."""
        rest = RowSet()
        rest._bits = bytearray(self._bits)
        for byte, bits in enumerate(other._bits):
            rest._bits[byte] &= ~bits
        rest.count = self.count - other.count
        return rest

    def next_missing(self, index: int) -> int:
        """Return the first number from `index` on that is not in the set."""
        while index in self:
            if not index & 7:
                while self._bits[index >> 3 : (index >> 3) + 1] == b"\xff":
                    index += 8
                if index not in self:
                    return index
            index += 1
        return index

    def next_present(self, index: int) -> int:
        """Return the first number from `index` on that is in the set; behind the largest, a number that is not."""
        while index >> 3 < len(self._bits) and index not in self:
            rest_of_byte = self._bits[index >> 3] >> (index & 7)
            index += 1 if rest_of_byte else 8 - (index & 7)
        return index


class AnsweredRows:
    """The rows that have a line in the output, and among them those whose line is an error."""

    def __init__(self) -> None:
        self.all = RowSet()
        self.failed = RowSet()

    def without_failed(self) -> AnsweredRows:
        """Return the same without the failed rows."""
        rest = AnsweredRows()
        rest.all = self.all.minus(self.failed)
        return rest
