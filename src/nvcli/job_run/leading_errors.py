"""Notices that the first rows of a job all fail with one cause, as all others likely would."""

from __future__ import annotations

from nvcli.jobs.job import ErrorInfo, JobResult


class LeadingErrors:
    """Counts the failures of the first rows that are read. They are done in any order, and later rows before them."""

    def __init__(self, count: int) -> None:
        """So many rows must all fail with one error type; 0: it does not look."""
        self._count = count
        self._expected: set[int] = set()
        """The first rows, by index, that are not done yet."""
        self._num_expected = 0
        self._num_failed = 0
        self.is_open = count > 0
        """Whether all of these rows may still fail with one cause, and have not all done so."""
        self.first: ErrorInfo | None = None
        """The error of the first of them that failed."""

    @property
    def all_failed(self) -> bool:
        """Whether they have all failed with one cause, and no row was answered by then."""
        return self._num_failed == self._count > 0

    def expect(self, index: int) -> None:
        """Take note of a row that is read; rows come in their order."""
        if self._num_expected < self._count:
            self._num_expected += 1
            self._expected.add(index)

    def add(self, result: JobResult) -> None:
        """Take note of a row that is done."""
        error = result.error
        if error is None or not self.is_open:
            self.is_open = False
        elif result.place.index in self._expected:
            self._expected.discard(result.place.index)
            self.first = self.first or error
            self._num_failed += error.type == self.first.type
            self.is_open = error.type == self.first.type and not self.all_failed
