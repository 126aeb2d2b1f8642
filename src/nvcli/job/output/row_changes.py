"""Compares the rows of a changed input with those an output was made from.

A row is the same one if it has the same bytes, wherever it stands. Of the others, rows are paired by their ids, and
rows without an id (in one input or in both) by the places where they stand: these rows were edited. A row without a
partner is new or gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nvcli.core.byte_sizes import counted
from nvcli.job.rows.row_digest import DIGEST_BYTES

_MANY_ROWS = 1 << 20
_NUM_PARTS = 16
"""Number of parts in which more than `_MANY_ROWS` rows are compared, to save memory."""
_NOWHERE = -1

_Keys = npt.NDArray[np.uint64]
_Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChanges:
    """The changes from the old rows to the new ones."""

    num_edited: int
    num_new: int
    num_gone: int
    num_unread: int
    """Rows that may be old, but were not read before, because the old inputs were not read to their end."""
    num_moved: int
    """Unchanged rows with another index."""
    edited: _Indices
    """The old indices of the edited rows."""
    new_index: _Indices
    """The present index of each old row; -1 if it was edited or is gone."""

    @property
    def is_none(self) -> bool:
        """Whether all rows are unchanged and in place."""
        return not (self.num_moved or self.num_unread or self.num_new or not self.keeps_all)

    @property
    def keeps_all(self) -> bool:
        """Whether every old row is unchanged and in place; there may be new ones after them."""
        return not (self.num_edited or self.num_gone or self.num_moved)

    @property
    def only_edits(self) -> bool:
        """Whether rows were edited in place, and nothing else is known to have changed."""
        return not (self.num_gone or self.num_moved or self.num_new)

    def index_of(self, old_index: int) -> int | None:
        """Return the present index of an old row; None if it has changed or is unknown."""
        if old_index >= len(self.new_index):
            return None
        index = int(self.new_index[old_index])
        return None if index == _NOWHERE else index

    def describe(self) -> str:
        """Summarise the changes, such as `3 rows edited, 200 new, 1 gone`."""
        counts = [
            (self.num_edited, "edited"),
            (self.num_new, "new"),
            (self.num_gone, "gone"),
            (self.num_unread, "not read before"),
        ]
        told = [(count, word) for count, word in counts if count]
        if not told:
            told = [(self.num_moved, "in another place")]
        (first, word), *others = told
        return ", ".join([f"{counted(first, 'row')} {word}", *(f"{n:,} {w}" for n, w in others)])


def compare_rows(old: bytes | bytearray, new: bytes | bytearray, *, old_is_all: bool) -> RowChanges:
    """Compare the concatenated digests of old and new rows.

    `old_is_all` says that the old inputs had no other rows than these.
    """
    olds, news = _Rows(old), _Rows(new)
    num_shared = min(olds.count, news.count)
    new_index = np.full(olds.count, _NOWHERE, np.int64)
    is_in_place = (olds.content[:num_shared] == news.content[:num_shared]) & (
        olds.content_rest[:num_shared] == news.content_rest[:num_shared]
    )
    in_place = np.flatnonzero(is_in_place)
    new_index[in_place] = in_place
    olds.is_left[in_place] = news.is_left[in_place] = False
    num_moved = 0
    for old_places, new_places in _pairs(olds, news, _Rows.contents):
        is_same = olds.content_rest[old_places] == news.content_rest[new_places]
        old_places, new_places = old_places[is_same], new_places[is_same]
        new_index[old_places] = new_places
        olds.is_left[old_places] = news.is_left[new_places] = False
        num_moved += len(old_places)
    edited = [np.zeros(0, np.int64)]
    for old_places, new_places in _pairs(olds, news, _Rows.ids):
        olds.is_left[old_places] = news.is_left[new_places] = False
        edited.append(old_places)
    may_be_edited = olds.is_left[:num_shared] & news.is_left[:num_shared]
    by_place = np.flatnonzero(may_be_edited & ~(olds.has_id()[:num_shared] & news.has_id()[:num_shared]))
    olds.is_left[by_place] = news.is_left[by_place] = False
    edited.append(by_place)
    num_unread = 0 if old_is_all else int(np.count_nonzero(news.is_left[olds.count :]))
    all_edited = np.sort(np.concatenate(edited))
    return RowChanges(
        num_edited=len(all_edited),
        num_new=int(np.count_nonzero(news.is_left)) - num_unread,
        num_gone=int(np.count_nonzero(olds.is_left)),
        num_unread=num_unread,
        num_moved=num_moved,
        edited=all_edited,
        new_index=new_index,
    )


class _Rows:
    """Rows as views of the parts of their digests (`rows.row_digest`)."""

    def __init__(self, digests: bytes | bytearray) -> None:
        whole = memoryview(digests)[: len(digests) // DIGEST_BYTES * DIGEST_BYTES]
        self._words = np.frombuffer(whole, "<u8").reshape(-1, 2)
        self._halves = np.frombuffer(whole, "<u2").reshape(-1, 8)
        self.count = len(self._words)
        self.content = self._words[:, 0]
        self.content_rest = self._halves[:, 4]
        self.is_left = np.ones(self.count, bool)
        """Rows not paired yet."""

    def has_id(self) -> npt.NDArray[np.bool_]:
        """Tell which rows have an id of their own."""
        halves = self._halves
        has_id: npt.NDArray[np.bool_] = (halves[:, 5] | halves[:, 6] | halves[:, 7]) != 0
        return has_id

    def contents(self, part: int, num_parts: int) -> tuple[_Indices, _Keys]:
        """Return the places and contents of a part of the remaining rows."""
        places = np.flatnonzero(self.is_left & (self._halves[:, 0] % num_parts == part))
        return places, self.content[places]

    def ids(self, part: int, num_parts: int) -> tuple[_Indices, _Keys]:
        """Return the places and ids of a part of the remaining rows that have one."""
        places = np.flatnonzero(self.is_left & self.has_id() & (self._halves[:, 7] % num_parts == part))
        return places, self._words[places, 1] >> np.uint64(16)


def _pairs(
    olds: _Rows, news: _Rows, keys: Callable[[_Rows, int, int], tuple[_Indices, _Keys]]
) -> Iterator[tuple[_Indices, _Indices]]:
    """Yield the places of rows with equal keys, pairing the n-th old row of a key with the n-th new one."""
    num_left = np.count_nonzero(olds.is_left) + np.count_nonzero(news.is_left)
    num_parts = _NUM_PARTS if num_left > _MANY_ROWS else 1
    for part in range(num_parts):
        old_places, old_keys = keys(olds, part, num_parts)
        new_places, new_keys = keys(news, part, num_parts)
        old_order, new_order = np.argsort(old_keys, kind="stable"), np.argsort(new_keys, kind="stable")
        old_keys, new_keys = old_keys[old_order], new_keys[new_order]
        number = np.arange(len(old_keys)) - np.searchsorted(old_keys, old_keys)  # among rows with the same key
        at = np.searchsorted(new_keys, old_keys) + number
        found = np.flatnonzero(at < len(new_keys))
        found = found[new_keys[at[found]] == old_keys[found]]
        yield old_places[old_order[found]], new_places[new_order[at[found]]]
