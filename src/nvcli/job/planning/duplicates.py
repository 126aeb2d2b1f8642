"""Rows with equal answers are computed once.

Rows with the same `answer_key` have equal answers. While one of them waits or runs, the others wait for it; the latest
answers are kept for rows that come later, within bounds.
"""

from __future__ import annotations

import msgspec

from nvcli.core.lru_cache import LruCache
from nvcli.errors import RowError
from nvcli.job.job import JobResult, RowContext, failed
from nvcli.job.text.prepare import PreparedRow

_NOWHERE = RowContext(id=0, index=0, line="")


class Duplicates:
    """Rows that wait for the answer of an equal row, and answers kept for later rows. Not thread-safe."""

    def __init__(self, *, max_rows: int, max_bytes: int, max_kept_bytes: int, is_on: bool = True) -> None:
        """`max_rows` and `max_bytes` bound the rows that wait for another row's answer.

        `max_kept_bytes` bounds the answers that are kept for rows to come. Bytes are estimates. Where it is not
        on, every row is computed.
        """
        self._is_on = is_on
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._followers: dict[bytes, list[tuple[RowContext, int]]] = {}
        """Rows that wait for the one being computed, with their bytes, by answer key."""
        self._kept = LruCache[bytes, JobResult](max_kept_bytes, lambda _, answer: answer.num_bytes)
        """Kept answers by answer key."""
        self._ready: list[tuple[PreparedRow, JobResult]] = []
        self.num_rows = 0
        """Number of rows that wait for another row's answer."""
        self.num_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether no more rows should be admitted for now. A row admitted anyway is kept."""
        return self.num_rows >= self._max_rows or self.num_bytes >= self._max_bytes

    def admit(self, row: PreparedRow) -> bool:
        """Admit a row, and tell whether to compute it.

        True: compute it, and then call `finish`. False: its result comes from `take_ready`.
        """
        key = row.answer_key
        if key is None or not self._is_on:
            return True
        answer = self._kept.get(key)
        if answer is not None:
            self._ready.append((row, _copy(answer, row.context)))
            return False
        followers = self._followers.get(key)
        if followers is None:
            self._followers[key] = []
            return True
        num_bytes = row.num_bytes - len(row.prompt_ids)
        followers.append((row.context, num_bytes))
        self.num_rows += 1
        self.num_bytes += num_bytes
        return False

    def is_awaited(self, row: PreparedRow) -> bool:
        """Tell whether other rows wait for the answer of an admitted row."""
        return row.answer_key is not None and bool(self._followers.get(row.answer_key))

    def finish(self, row: PreparedRow, result: JobResult, error: RowError | None) -> None:
        """Take the result of an admitted row. `error` is the row's error without its place in the input."""
        key = row.answer_key
        if key is None or not self._is_on:
            return
        followers = self._followers.pop(key)
        if error is None:  # what the row passes through is not kept with its answer
            self._kept.put(key, msgspec.structs.replace(result, context=_NOWHERE))
        for context, num_bytes in followers:
            self.num_rows -= 1
            self.num_bytes -= num_bytes
            self._ready.append((row, _copy(result, context) if error is None else failed(context, error)))

    def take_ready(self) -> list[tuple[PreparedRow, JobResult]]:
        """Return the results of rows that were not computed, each once.

        Each result comes with the row itself or the equal one that was computed.
        """
        ready, self._ready = self._ready, []
        return ready

    def forget_answers(self) -> None:
        """Forget the answers that are kept for later rows."""
        self._kept.clear()


def _copy(answer: JobResult, context: RowContext) -> JobResult:
    """Return an answer for an equal row, whose prompt counts as cached."""
    usage = msgspec.structs.replace(answer.usage, cached_tokens=answer.usage.prompt_tokens)
    return msgspec.structs.replace(answer, context=context, usage=usage)
