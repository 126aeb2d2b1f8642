"""BadWords: token sequences that answers must not contain, for each slot, on the device.

A token is forbidden if it would complete a sequence whose other tokens are the answer's last ones. The device checks
this, because the host prepares a step before it knows those tokens. The table takes no memory until a request brings
bad words, and then as much as the longest list of the longest words needs.

Shapes: S slots, W words of a slot, L tokens of a word before its last one, n rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nvcli.core.messages import FORBIDDEN, NewSlot
from nvcli.worker.runner.uploader import to_device

_ANY = -1
"""Padding in the table before a word that is shorter than the longest: matches any token."""
_NOTHING = -2
"""Stands for tokens before the answer, and for words that a slot does not have: matches nothing."""


class BadWords:
    """The bad words of `num_rows` slots."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._device = device
        self._table = torch.full((num_rows, 0, 1), _NOTHING, dtype=torch.int32, device=device)
        """[S, W, L + 1]: the tokens before the last one, nearest first, then the last one."""

    def fill(self, new_slots: Sequence[NewSlot]) -> None:
        """Take in the words of requests that enter slots; each has some. Never waits for the device."""
        words = [new.sampling.bad_words for new in new_slots]
        num_words = max(map(len, words))
        length = max(len(word) for each in words for word in each)
        self._grow(num_words, length)
        _, width, length = self._table.shape
        rows = np.full((len(words), width, length), _NOTHING, dtype=np.int32)
        for row, each in zip(rows, words, strict=True):
            for place, word in zip(row, each, strict=False):
                place[:-1] = _ANY
                place[: len(word) - 1] = word[-2::-1]
                place[-1] = word[-1]
        slots = np.array([new.slot for new in new_slots])
        self._table[to_device(slots, self._device)] = to_device(rows, self._device)

    def forbid(
        self, logits: Tensor, at: Tensor, slots: Tensor, positions: Tensor, *, tokens: Tensor, prompt_lens: Tensor
    ) -> None:
        """Forbid tokens that would complete a word, in rows `at` [n] of logits [N, V] float32, in place.

        slots: [N] int64; positions: [N], of the tokens to be sampled; tokens: [S, max_model_len] int32, each request's
        tokens by position; prompt_lens: [S] int32, where each answer begins.
        """
        slot, position = slots[at], positions[at].long()
        table = self._table[slot]
        before = position[:, None] - 1 - torch.arange(table.shape[2] - 1, device=logits.device)  # [n, L]
        last = tokens[slot[:, None], before.clamp(min=0)]
        last = last.masked_fill(before < prompt_lens[slot].long()[:, None], _NOTHING)[:, None]  # [n, 1, L]
        wanted = table[:, :, :-1]
        is_there = ((wanted == last) | (wanted == _ANY)).all(dim=-1) & (table[:, :, -1] >= 0)  # [n, W]
        values = torch.where(is_there, FORBIDDEN, 0.0)
        ids = table[:, :, -1].long().clamp(min=0)
        logits.index_put_((at[:, None].expand_as(ids), ids), values, accumulate=True)

    def _grow(self, num_words: int, length: int) -> None:
        """Make room for this many words of this many tokens in every slot."""
        old = self._table
        _, width, most = old.shape
        if num_words <= width and length <= most:
            return
        shape = (self._num_rows, max(num_words, width), max(length, most))
        self._table = torch.full(shape, _NOTHING, dtype=torch.int32, device=self._device)
        if width:
            self._table[:, :width, most - 1 : -1] = _ANY
            self._table[:, :width, : most - 1] = old[:, :, :-1]
            self._table[:, :width, -1] = old[:, :, -1]
