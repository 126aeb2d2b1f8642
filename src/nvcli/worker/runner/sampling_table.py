"""SamplingTable: the sampling parameters of each slot, on the device, one row per slot.

All slots that a step fills are filled by one upload, and nothing here waits for the device. The host keeps the values
that decide how a batch is sampled, as numpy arrays that are read for a whole batch at once.

The last row is the padding slot's. It is greedy and has no limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag

import numpy as np
import torch

from nvcli.core.config_types import MAX_INT32
from nvcli.core.messages import FORBIDDEN, MAX_STOP_IDS, NewSlot
from nvcli.kernels.sampling_columns import MAX_CANDIDATES, LogitChanges, SamplingColumns
from nvcli.kernels.slot_filling import fill_columns, fill_entries
from nvcli.worker.runner.bad_words import BadWords
from nvcli.worker.runner.uploader import Uploader, to_device

_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_LONGS = ("seed", "row", "sample")


class SamplingFlag(IntFlag):
    """The demands of a slot on the sampler beyond greedy or temperature."""

    SMALL_TOP_K = 1
    """A top-k up to MAX_CANDIDATES, alone or with top-p and min-p."""
    OTHER_LIMITS = 2
    """Top-k, top-p or min-p, other than a small top-k."""
    PENALTIES = 4
    ADJUSTED = 8
    """Biased tokens, and forbidden ones beside them or log-probabilities; others are forbidden for any batch."""
    LOGPROBS = 16
    CONSTRAINED = 32
    """An answer that follows a grammar."""
    ALLOWED = 64
    """Only some tokens may be chosen."""
    BAD_WORDS = 128
    """Sequences of tokens that must not appear."""


class SamplingTable:
    """Sampling parameters of `num_slots` slots and of the padding slot."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        num_rows = num_slots + 1
        # One tensor for each width, so that slots are filled by one operation.
        self._words = torch.zeros(len(_FLOATS) + 4, num_rows, dtype=torch.int32, device=device)
        self._longs = torch.zeros(len(_LONGS), num_rows, dtype=torch.int64, device=device)
        floats = self._words.view(torch.float32)
        temperature, top_p, min_p, presence, frequency, repetition = floats[: len(_FLOATS)]
        top_k, prompt_len, min_len, num_forbidden = self._words[len(_FLOATS) :]
        seed, row, sample = self._longs
        self.columns = SamplingColumns(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, row=row, sample=sample
        )
        self.changes = LogitChanges(
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
            prompt_len=prompt_len,
            min_len=min_len,
            num_forbidden=num_forbidden,
            entry_ids=torch.zeros(num_rows, MAX_STOP_IDS, dtype=torch.int32, device=device),
            entry_values=torch.zeros(num_rows, MAX_STOP_IDS, dtype=torch.float32, device=device),
        )
        """The slots' changes to their logits. A slot's entries are its biased tokens, then its stop ids, then its
        allowed tokens, which have the value +inf."""
        self.bad_words = BadWords(num_rows, device)

        self.flags_host = np.zeros(num_rows, dtype=np.uint8)
        """[S], `SamplingFlag`s."""
        self.num_logprobs_host = np.zeros(num_rows, dtype=np.int64)
        """[S], the alternatives that a slot with LOGPROBS wants."""
        self.num_adjusted_host = np.zeros(num_rows, dtype=np.int64)
        """[S], the number of entries of `changes` in use."""

    def fill(self, new_slots: Sequence[NewSlot], upload: Uploader) -> None:
        """Take in the parameters of requests that enter slots, at least one."""
        samplings = [new.sampling for new in new_slots]
        slots = np.array([new.slot for new in new_slots])
        floats = np.array([[getattr(s, name) for name in _FLOATS] for s in samplings], dtype=np.float32)
        forbidden = [_num_forbidden(new) for new in new_slots]
        ints = [
            (s.top_k, s.prompt_len, s.prompt_len + s.min_tokens, count)
            for s, count in zip(samplings, forbidden, strict=True)
        ]
        clipped = np.array([[min(value, MAX_INT32) for value in row] for row in ints], dtype=np.int32)
        longs = np.array([[getattr(s, name) for name in _LONGS] for s in samplings], dtype=np.int64)
        values = np.concatenate([floats.view(np.int32), clipped, longs.view(np.int32)], axis=1)
        slots_there, values_there = upload(slots, values.ravel())
        fill_columns(self._words, self._longs, slots_there, values_there.view(values.shape))
        self.flags_host[slots] = list(map(_flags, new_slots, forbidden))
        self.num_logprobs_host[slots] = [max(0, s.num_logprobs) for s in samplings]
        had_entries = self.num_adjusted_host[slots] > 0
        self.num_adjusted_host[slots] = [
            len(new.sampling.bias_ids) + len(_held_back(new)) + len(new.sampling.allowed_ids) for new in new_slots
        ]
        changes_entries = had_entries | (self.num_adjusted_host[slots] > 0)
        adjusted = [new for new, changes in zip(new_slots, changes_entries, strict=True) if changes]
        if adjusted:
            self._fill_adjusted(adjusted)
        with_words = [new for new in new_slots if new.sampling.bad_words]
        if with_words:
            self.bad_words.fill(with_words)

    def _fill_adjusted(self, new_slots: list[NewSlot]) -> None:
        slots = np.array([new.slot for new in new_slots], dtype=np.int32)
        longest = int(self.num_adjusted_host[slots].max())
        ids = np.zeros((len(slots), longest), dtype=np.int32)
        values = np.zeros((len(slots), longest), dtype=np.float32)
        for i, new in enumerate(new_slots):
            s, held_back = new.sampling, _held_back(new)
            entries = [*s.bias_ids, *held_back, *s.allowed_ids]
            ids[i, : len(entries)] = entries
            stops, allowed = [-np.inf] * len(held_back), [np.inf] * len(s.allowed_ids)
            values[i, : len(entries)] = [*s.bias_values, *stops, *allowed]
        packed = np.concatenate([slots, np.stack([ids, values.view(np.int32)], axis=1).ravel()])
        there = to_device(packed, self._words.device)
        slots_there, entries_there = there[: len(slots)], there[len(slots) :].view(len(slots), 2, longest)
        fill_entries(self.changes.entry_ids, self.changes.entry_values, slots_there, entries_there)


def _held_back(new: NewSlot) -> list[int]:
    """Return the ids that must not be chosen yet. In a constrained answer, its masks hold them back, unless nothing
    else is allowed."""
    return [] if new.constraint is not None else new.sampling.stop_ids


def _num_forbidden(new: NewSlot) -> int:
    """Return the number of tokens to forbid, if nothing else changes the logits and nobody asks for their
    probabilities; otherwise 0."""
    s = new.sampling
    is_all = s.num_logprobs < 0 and not s.allowed_ids and all(value == FORBIDDEN for value in s.bias_values)
    return len(s.bias_ids) + len(_held_back(new)) if is_all else 0


def _flags(new: NewSlot, num_forbidden: int) -> int:
    s, flags = new.sampling, SamplingFlag(0)
    if new.constraint is not None:
        flags |= SamplingFlag.CONSTRAINED
    if s.temperature > 0 and 0 < s.top_k <= MAX_CANDIDATES:
        flags |= SamplingFlag.SMALL_TOP_K
    elif s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0):
        flags |= SamplingFlag.OTHER_LIMITS
    if s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1:
        flags |= SamplingFlag.PENALTIES
    if (s.bias_ids or _held_back(new)) and not num_forbidden:
        flags |= SamplingFlag.ADJUSTED
    if s.allowed_ids:
        flags |= SamplingFlag.ALLOWED
    if s.bad_words:
        flags |= SamplingFlag.BAD_WORDS
    if s.num_logprobs >= 0:
        flags |= SamplingFlag.LOGPROBS
    return int(flags)
