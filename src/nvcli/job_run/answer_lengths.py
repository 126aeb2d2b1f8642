"""Counts how long answers are, for the estimate of what a run has left.

Samples are grouped by the orders of magnitude of their `max_tokens` and of their prompts, because a row that may have
ten tokens says little about one that may have ten thousand, and long prompts may have long answers. Lengths are counted
in bins, so that adding one costs the same however many there were. This module only counts; `progress.survival` makes
an estimate of the counts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from nvcli.job_run.text.prepare import PreparedRow

_BINS_PER_OCTAVE = 16


class LengthClass(NamedTuple):
    """A group of samples: the numbers of binary digits of their `max_tokens` and of their prompt's tokens."""

    max_tokens: int
    prompt: int


def length_class(max_tokens: int, num_prompt_tokens: int) -> LengthClass:
    """Return the group of samples that may have so many tokens, and whose prompt has so many."""
    return LengthClass(max_tokens.bit_length(), num_prompt_tokens.bit_length())


def bin_of(length: int) -> int:
    """Return the bin of a length in tokens: exact below 32, then 16 bins for each doubling."""
    shift = max(0, length.bit_length() - 5)
    return _BINS_PER_OCTAVE * shift + (length >> shift)


def bin_start(number: int) -> int:
    """Return the smallest length in a bin, in tokens."""
    shift = max(0, number // _BINS_PER_OCTAVE - 1)
    return (number - _BINS_PER_OCTAVE * shift) << shift


def bin_middle(number: int) -> float:
    """Return the length in the middle of a bin, in tokens."""
    return (bin_start(number) + bin_start(number + 1) - 1) / 2


class ClassTotals:
    """Sums over the samples of one length class."""

    __slots__ = ("asked_samples", "max_tokens", "prompt_tokens", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self.asked_samples = 0
        """Samples whose row, or the configuration, names a `max_tokens`; the others may fill `max_model_len`."""
        self.max_tokens = 0
        self.prompt_tokens = 0
        """Prompt tokens, counted for each sample."""


class ReadTotals:
    """Sums over the rows that were read and prepared, by length class."""

    def __init__(self) -> None:
        self.classes: dict[LengthClass, ClassTotals] = {}

    def add(self, row: PreparedRow) -> None:
        """Add one row with all its samples."""
        key = length_class(row.max_tokens, row.num_prompt_tokens)
        totals = self.classes.get(key) or ClassTotals()
        samples = row.sampling.num_samples
        totals.samples += samples
        totals.max_tokens += samples * row.max_tokens
        totals.prompt_tokens += samples * row.num_prompt_tokens
        if row.sampling.max_tokens is not None:
            totals.asked_samples += samples
        self.classes[key] = totals  # last: another thread may look at any time


class EndedSamples:
    """The samples of one length class that have ended."""

    __slots__ = ("cut", "samples", "stopped")

    def __init__(self) -> None:
        self.samples = 0
        """All samples that need no more work, those that failed or were not computed included."""
        self.stopped: Counter[int] = Counter()
        """Samples that ended by themselves, by the bin of their length."""
        self.cut: Counter[int] = Counter()
        """Samples that came to their `max_tokens`, by the bin of their length: they would have been longer."""


class AnswerLengths:
    """The lengths of the samples that have ended, by length class."""

    def __init__(self) -> None:
        self.classes: defaultdict[LengthClass, EndedSamples] = defaultdict(EndedSamples)
        self.generated_tokens = 0
        """The tokens of all these samples."""
        self.prompt_tokens = 0
        """The prompt tokens of all these samples that were computed."""

    def add(self, row: PreparedRow, length: int, *, is_cut: bool) -> None:
        """Add a sample of a row that has ended with so many tokens. `is_cut`: because it may not have more."""
        ended = self._end(row, 1)
        (ended.cut if is_cut else ended.stopped)[bin_of(length)] += 1
        self.generated_tokens += length
        self.prompt_tokens += row.num_prompt_tokens

    def drop(self, row: PreparedRow, samples: int) -> None:
        """Note that so many samples of a row are not computed (any further)."""
        self._end(row, samples)

    def _end(self, row: PreparedRow, samples: int) -> EndedSamples:
        ended = self.classes[length_class(row.max_tokens, row.num_prompt_tokens)]
        ended.samples += samples
        return ended
