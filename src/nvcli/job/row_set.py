"""Sets of row numbers, one bit per row: the rows that an output already answers."""

from __future__ import annotations

from collections import Counter

_PAGE_ROWS = 4096


class RowSet:
    """A set of row numbers from 0.

    Only pages of 4,096 numbers that are in use take memory, one bit per number. So a number far beyond the others, as
    a damaged or foreign line may have, takes little.
    """

    def __init__(self) -> None:
        self._pages: dict[int, int] = {}
        """The bits of each page that is not empty, that of its first number as the lowest."""
        self.count = 0

    def add(self, index: int) -> bool:
        """Add a number. Returns False if it was in the set before."""
        number, place = divmod(index, _PAGE_ROWS)
        page = self._pages.get(number, 0)
        if page >> place & 1:
            return False
        self._pages[number] = page | 1 << place
        self.count += 1
        return True

    def discard(self, index: int) -> None:
        """Take a number out if it is in the set."""
        if index in self:
            self._pages[index // _PAGE_ROWS] ^= 1 << index % _PAGE_ROWS
            self.count -= 1

    def __contains__(self, index: int) -> bool:
        return bool(self._pages.get(index // _PAGE_ROWS, 0) >> index % _PAGE_ROWS & 1)

    def minus(self, other: RowSet) -> RowSet:
        """Return this set without the numbers of its subset `other`."""
        rest = RowSet()
        rest._pages = {number: page & ~other._pages.get(number, 0) for number, page in self._pages.items()}
        rest.count = self.count - other.count
        return rest

    def is_within(self, other: RowSet) -> bool:
        """Tell whether this set is a subset of the other."""
        return not any(page & ~other._pages.get(number, 0) for number, page in self._pages.items())

    def next_missing(self, index: int, step: int = 1) -> int:
        """Return the first of the numbers `index`, `index + step` and so on that is not in the set."""
        while index in self:
            # With a step of 1, at most to the next page.
            index += step if step > 1 else _lowest_bit(~self._pages[index // _PAGE_ROWS] >> index % _PAGE_ROWS)
        return index

    def next_present(self, index: int) -> int:
        """Return the first number from `index` on that is in the set, or past the largest one, a number that is not."""
        first, place = divmod(index, _PAGE_ROWS)
        if rest := self._pages.get(first, 0) >> place:
            return index + _lowest_bit(rest)
        number = min((number for number, page in self._pages.items() if page and number > first), default=None)
        return index if number is None else number * _PAGE_ROWS + _lowest_bit(self._pages[number])


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


class AnsweredRows:
    """The rows that have a line in the output, and those of them that failed."""

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
        """Return these rows without the failed ones."""
        rest = AnsweredRows()
        rest.all = self.all.minus(self.failed)
        return rest
