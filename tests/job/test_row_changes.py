"""Rows are compared as one would do it by hand, however many and in whatever order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given

from nvcli.job.output import row_changes
from nvcli.job.output.row_changes import compare_rows
from nvcli.job.rows.row_digest import row_digest

Rows = Sequence[tuple[str, int | None]]
"""Each row's text and id."""


def digests(rows: Rows) -> bytes:
    return b"".join(row_digest(f"{text} {row_id}".encode(), row_id) for text, row_id in rows)


@pytest.mark.parametrize("many_rows", [0, 1 << 20])
@given(old=..., new=..., old_is_all=...)
def test_rows_are_paired(
    many_rows: int, old: list[tuple[bool, int | None]], new: list[tuple[bool, int | None]], old_is_all: bool
) -> None:
    olds = [("ab"[text], None if row_id is None else row_id % 5) for text, row_id in old]
    news = [("ab"[text], None if row_id is None else row_id % 5) for text, row_id in new]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_changes, "_MANY_ROWS", many_rows)
        changes = compare_rows(digests(olds), digests(news), old_is_all=old_is_all)
    places = changes.new_index.tolist()
    kept = [place for place in places if place >= 0]
    assert len(set(kept)) == len(kept)
    assert all(olds[index] == news[place] for index, place in enumerate(places) if place >= 0)
    assert len(kept) == (Counter(olds) & Counter(news)).total()
    assert all(places[i] == i for i in range(min(len(olds), len(news))) if olds[i] == news[i])
    assert changes.num_moved == sum(place not in (-1, index) for index, place in enumerate(places))
    assert changes.num_edited == len(changes.edited) <= len(olds) - len(kept)
    assert all(places[index] == -1 for index in changes.edited)
    assert changes.num_gone == len(olds) - len(kept) - changes.num_edited
    assert changes.num_new + changes.num_unread == len(news) - len(kept) - changes.num_edited
    assert not (old_is_all and changes.num_unread)
    left_old = Counter(row_id for index, (_, row_id) in enumerate(olds) if places[index] < 0 and row_id is not None)
    left_new = Counter(row_id for index, (_, row_id) in enumerate(news) if index not in kept and row_id is not None)
    assert changes.num_edited >= (left_old & left_new).total()
    assert changes.is_none == (olds == news)


def test_what_has_changed_is_said_in_a_few_words() -> None:
    old = [("a", index) for index in range(5000)]
    new = [*(("b", index) for index in range(3)), *old[3:4999], *(("c", index) for index in range(5000, 5200))]
    changes = compare_rows(digests(old), digests(new), old_is_all=True)
    assert changes.describe() == "3 rows edited, 200 new, 1 gone"
    assert compare_rows(digests(old), digests(old[1:]), old_is_all=True).describe() == "1 row gone"
    assert compare_rows(digests(old), digests(old[::-1]), old_is_all=True).describe() == "5,000 rows in another place"
    assert compare_rows(digests(old[:9]), digests(old), old_is_all=False).describe() == "4,991 rows not read before"
    assert np.array_equal(
        compare_rows(digests(old), digests(old[::-1]), old_is_all=True).new_index, np.arange(5000)[::-1]
    )
