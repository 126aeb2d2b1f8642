"""Tally: the totals of a job's rows, added up row by row in bounded memory.

Lengths are counted exactly, as there are at most `max_model_len` different ones. Equal rows and shared beginnings
are recognised by hashes (`check.prefixes`).
"""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b

import msgspec

from nvcli.core.sampling_params import SamplingParams
from nvcli.job.job import JobResult, RowContext
from nvcli.job.text.prepare import PreparedRow
from nvcli.tools.check.image_counts import ImageCounts
from nvcli.tools.check.prefixes import SeenKeys, SharedBlocks, adapter_salt


class ErrorExample(msgspec.Struct, frozen=True, kw_only=True):
    """Failed rows with one type of error, and the first of them."""

    type: str
    count: int
    index: int
    """The first row's number over all inputs, from 0."""
    message: str
    """Message of the first row's error; it names the line."""


class Tally:
    """Totals of the rows so far."""

    def __init__(self, *, defaults: SamplingParams, block_size: int | None, finds_equal_rows: bool) -> None:
        """`defaults` is the sampling of a row that brings none.

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
        """Prompt tokens → number of rows that can be answered."""
        self.images = ImageCounts()
        """The images of these rows."""
        self.adapters: Counter[int] = Counter()
        """Number of a LoRA adapter (`PreparedRow.adapter`) → its rows that can be answered."""
        self.rows_with_own_sampling = 0
        """Rows whose sampling differs from the defaults."""
        self.equal_rows = 0
        """Rows that get the answer of an equal row."""
        self.repeated_prompts = 0
        """Rows that repeat an earlier row's prompt, under the same adapter, but sample their own answer."""
        self.computed_rows = 0
        """Rows to compute, because no earlier row is equal."""
        self.computed_prompt_tokens = 0
        """Prompt tokens of these rows, before the prefix cache."""
        self._failed_whole: RowContext | None = None
        """The last row with several prompts, one of which has failed."""
        self.answers: Counter[tuple[int, int]] = Counter()
        """(least, most tokens of an answer) → samples of these rows."""

    def add(self, row: PreparedRow | JobResult) -> None:
        """Add a prepared row, or the error that will be its answer."""
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
        self.lengths[row.num_prompt_tokens] += 1
        if row.images is not None:
            self.images.add(row.images)
        if row.task is None and row.sampling != self._defaults:
            self.rows_with_own_sampling += 1
        key = row.answer_key if self._finds_equal_rows else None
        self.adapters[row.adapter] += 1
        salt = adapter_salt(row.adapter)
        is_new = self._keys.add(key or blake2b(row.prompt_ids, digest_size=8, person=b"prompt", salt=salt).digest())
        if not is_new and key is not None:
            self.equal_rows += 1
            return
        self.repeated_prompts += not is_new
        self.computed_rows += 1
        self.computed_prompt_tokens += row.num_prompt_tokens
        if row.task is None:
            self._add_answers(row)
        if self.blocks is not None:
            self.blocks.add(row.prompt_ids, adapter=row.adapter)

    def _add_answers(self, row: PreparedRow) -> None:
        """Add the answers of a row that will be computed."""
        sampling = row.sampling
        nothing_ends_it = not row.stop_ids and not sampling.stop
        least = row.max_tokens if nothing_ends_it else max(1, sampling.min_tokens)
        self.answers[least, row.max_tokens] += sampling.num_samples

    @property
    def rows_failed(self) -> int:
        return self._errors.total()

    @property
    def may_miss_equal_rows(self) -> bool:
        """Whether there were too many different rows to remember them all."""
        return self._keys.is_full

    @property
    def errors(self) -> list[ErrorExample]:
        """Failed rows by type of error, the most frequent first."""
        return [
            ErrorExample(type=kind, count=count, index=example.context.index, message=example.error.message)
            for kind, count in self._errors.most_common()
            if (example := self._examples[kind]).error is not None
        ]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens of computed rows that the prefix cache saves at most."""
        return 0 if self.blocks is None else self.blocks.num_tokens

    def answer_tokens(self, expected: int | None) -> int:
        """Return the tokens of all computed answers if each ends after `expected` tokens; None: each runs to its
        limit."""
        return sum(
            count * (most if expected is None else min(most, max(least, expected)))
            for (least, most), count in self.answers.items()
        )
