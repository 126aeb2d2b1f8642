"""Tally: the totals of a job's rows, added up row by row in bounded memory.

Lengths are counted exactly, as there are no more different ones than `max_model_len`. Equal rows and shared beginnings
are known by hashes (`check.prefixes`).
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

import msgspec

from nvcli.check.prefixes import SeenKeys, SharedBlocks
from nvcli.job_run.text.prepare import PreparedRow
from nvcli.jobs.job import JobResult, RowContext
from nvcli.sampling_params import SamplingParams


class ErrorExample(msgspec.Struct, frozen=True, kw_only=True):
    """The failed rows of one type, and the first of them."""

    type: str
    count: int
    index: int
    """The first row's number over all inputs, from 0."""
    message: str
    """The error of the first row; it names the line."""


class Tally:
    """The totals of the rows so far."""

    def __init__(self, *, defaults: SamplingParams, block_size: int | None, finds_equal_rows: bool) -> None:
        """`defaults` are the sampling of a row that says nothing itself.

        `block_size` is that of the prefix cache; None: it is off. `finds_equal_rows`: rows with equal answers are
        computed once (`job.plan`).
        """
        self._defaults = defaults
        self._finds_equal_rows = finds_equal_rows
        self._errors: Counter[str] = Counter()
        self._examples: dict[str, JobResult] = {}
        self._keys = SeenKeys()
        self.blocks = None if block_size is None else SharedBlocks(block_size)
        self.rows = 0
        """All rows, failed ones included."""
        self.lengths: Counter[int] = Counter()
        """Rows that can be answered, by the tokens of their prompt."""
        self.samples = 0
        """Answers that will be computed or copied from an equal row: `n` for each row."""
        self.rows_with_own_sampling = 0
        """Rows whose sampling is another one than the defaults."""
        self.equal_rows = 0
        """Rows that get the answer of an equal row."""
        self.repeated_prompts = 0
        """Rows with the prompt of an earlier row that draw an answer of their own."""
        self.computed_rows = 0
        """Rows that are computed, because no earlier row is equal."""
        self.computed_prompt_tokens = 0
        """Prompt tokens of these rows, before the prefix cache."""
        self._failed_whole: RowContext | None = None
        """The last row with several prompts of which one has failed."""
        self.answers: Counter[tuple[int, int]] = Counter()
        """Samples of these rows by the least and the most tokens that they may have."""

    def add(self, row: PreparedRow | JobResult) -> None:
        """Add a row as it was prepared, or the error that it will be answered with."""
        part = row.context.part
        self.rows += part is None or part.number == 0
        if isinstance(row, JobResult):
            assert row.error is not None
            if part is not None and self._failed_whole is part.whole:
                return  # another prompt of the same row
            self._failed_whole = None if part is None else part.whole
            self._errors[row.error.type] += 1
            self._examples.setdefault(row.error.type, row)
            return
        sampling = row.sampling
        self.lengths[row.num_prompt_tokens] += 1
        self.samples += sampling.num_samples
        if row.task is None and sampling != self._defaults:
            self.rows_with_own_sampling += 1
        key = row.answer_key if self._finds_equal_rows else None
        is_new = self._keys.add(key or blake2b(row.prompt_ids, digest_size=8, person=b"prompt").digest())
        if not is_new and key is not None:
            self.equal_rows += 1
            return
        self.repeated_prompts += not is_new
        self.computed_rows += 1
        self.computed_prompt_tokens += row.num_prompt_tokens
        if row.task is None:
            self._add_answers(row)
        if self.blocks is not None:
            self.blocks.add(row.prompt_ids)

    def _add_answers(self, row: PreparedRow) -> None:
        """Add the answers of a row that is computed."""
        sampling = row.sampling
        nothing_ends_it = not row.stop_ids and not sampling.stop
        least = row.max_tokens if nothing_ends_it else max(1, sampling.min_tokens)
        self.answers[least, row.max_tokens] += sampling.num_samples

    @property
    def rows_failed(self) -> int:
        return self._errors.total()

    @property
    def may_miss_equal_rows(self) -> bool:
        """Whether there were so many different rows that not all of them are remembered."""
        return self._keys.is_full

    @property
    def errors(self) -> list[ErrorExample]:
        """The failed rows by type, the most frequent first."""
        return [
            ErrorExample(type=kind, count=count, index=example.context.index, message=example.error.message)
            for kind, count in self._errors.most_common()
            if (example := self._examples[kind]).error is not None
        ]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens of rows that are computed which the prefix cache saves at most."""
        return 0 if self.blocks is None else self.blocks.num_tokens

    def answer_tokens(self, expected: int | None) -> int:
        """Return the tokens of all computed answers, if each would end after `expected` tokens; None: as late as it
        may."""
        return sum(
            count * (most if expected is None else min(most, max(least, expected)))
            for (least, most), count in self.answers.items()
        )
