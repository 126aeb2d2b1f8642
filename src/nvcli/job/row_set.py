"""Sets of row numbers, one bit a row: the rows that an output answers already."""

from __future__ import annotations

from collections import Counter

_PAGE_BITS = 15
_PAGE_ROWS = 1 << _PAGE_BITS


class RowSet:
    """A set of row numbers from 0.

    It takes one bit for each number of the pages of 32,768 numbers that it has numbers of. So a number far beyond the
    others, as a damaged or foreign line may have, takes 4 KiB.
    """

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self.count = 0

    def add(self, index: int) -> bool:
        """Add a number. Returns False if it was in the set before."""
        page = self._pages.get(index >> _PAGE_BITS)
        if page is None:
            page = self._pages[index >> _PAGE_BITS] = bytearray(_PAGE_ROWS // 8)
        byte, bit = (index & _PAGE_ROWS - 1) >> 3, 1 << (index & 7)
        if page[byte] & bit:
            return False
        page[byte] |= bit
        self.count += 1
        return True

    def discard(self, index: int) -> None:
        """Take a number out if it is in the set."""
        if index in self:
            self._pages[index >> _PAGE_BITS][(index & _PAGE_ROWS - 1) >> 3] &= ~(1 << (index & 7))
            self.count -= 1

    def __contains__(self, index: int) -> bool:
        page = self._pages.get(index >> _PAGE_BITS)
        return page is not None and bool(page[(index & _PAGE_ROWS - 1) >> 3] & 1 << (index & 7))

    def minus(self, other: RowSet) -> RowSet:
        """Return this set without the numbers of `other`, which must all be in it."""
        rest = RowSet()
        rest._pages = {number: bytearray(page) for number, page in self._pages.items()}
        for number, page in other._pages.items():
            mine = rest._pages[number]
            for byte, bits in enumerate(page):
                mine[byte] &= ~bits
        rest.count = self.count - other.count
        return rest

    def is_within(self, other: RowSet) -> bool:
        """Tell whether all numbers of this set are in the other one too."""
        nothing = bytes(_PAGE_ROWS // 8)
        return all(
            _bits_from(page, 0) & ~_bits_from(other._pages.get(number, nothing), 0) == 0
            for number, page in self._pages.items()
        )

    def next_missing(self, index: int, step: int = 1) -> int:
        """Return the first of the numbers `index`, `index + step` and so on that is not in the set."""
        while step > 1 and index in self:
            index += step
        while index in self:
            page = self._pages[index >> _PAGE_BITS]
            index += _lowest_bit(~_bits_from(page, index & _PAGE_ROWS - 1))  # at most to the next page
        return index

    def next_present(self, index: int) -> int:
        """Return the first number from `index` on that is in the set; behind the largest, a number that is not."""
        if index in self:
            return index
        first = index >> _PAGE_BITS
        rest = _bits_from(self._pages.get(first, b""), index & _PAGE_ROWS - 1)
        if rest:
            return index + _lowest_bit(rest)
        for number in sorted(number for number in self._pages if number > first):
            rest = _bits_from(self._pages[number], 0)
            if rest:
                return (number << _PAGE_BITS) + _lowest_bit(rest)
        return index


def _bits_from(page: bytes | bytearray, place: int) -> int:
    """Return the bits of a page from a place on, that of the place itself as the lowest."""
    return int.from_bytes(page[place >> 3 :], "little") >> (place & 7)


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


class AnsweredRows:
    """The rows that have a line in the output, and among them those whose line is an error."""

    def __init__(self) -> None:
        self.all = RowSet()
        self.failed = RowSet()
        self.errors: Counter[str] = Counter()
        """The failed rows by error type."""

    def add(self, index: int, error_type: str | None) -> bool:
        """Add a row; `error_type` is None where it is answered. Returns False if the row was there before."""
        if not self.all.add(index):
            return False
        if error_type is not None:
            self.failed.add(index)
            self.errors[error_type] += 1
        return True

    def discard(self, index: int, error_type: str | None) -> None:
        """Take out a row that was added with this error type."""
        self.all.discard(index)
        if error_type is not None:
            self.failed.discard(index)
            self.errors[error_type] -= 1

    def without_failed(self) -> AnsweredRows:
        """Return the same without the failed rows."""
        rest = AnsweredRows()
        rest.all = self.all.minus(self.failed)
        return rest
