"""Order is kept in bounded memory: what must wait waits in a file that nobody sees."""

from __future__ import annotations

import errno
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvcli.errors import OutputError
from nvcli.job.output.reorder import ReorderBuffer


@given(
    order=st.permutations(range(40)),
    missing=st.sets(st.integers(0, 39)),
    max_bytes=st.sampled_from([1, 700, 10**6]),
    sizes=st.lists(st.integers(0, 2000), min_size=40, max_size=40),
)
def test_lines_come_out_in_order(order: list[int], missing: set[int], max_bytes: int, sizes: list[int]) -> None:
    def next_row(index: int) -> int:
        return index if index not in missing else next_row(index + 1)

    waiting = ReorderBuffer(next_row, max_bytes=max_bytes)
    expected = [bytes([index]) * sizes[index] for index in range(40) if index not in missing]
    out = []
    for index in order:
        if index not in missing:
            waiting.add(index, bytes([index]) * sizes[index])
            out += waiting.take()
    assert out == expected
    assert not waiting
    assert waiting.spilled_bytes == 0
    waiting.close()


def test_a_late_first_row_costs_disk_and_not_memory(tmp_path: Path) -> None:
    waiting = ReorderBuffer(max_bytes=1 << 20, folder=tmp_path)
    tracemalloc.start()
    for index in range(1, 20_000):
        waiting.add(index, b"x" * 1000)
        assert list(waiting.take()) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 << 20
    assert waiting.spilled_bytes > 18_000_000
    assert list(tmp_path.iterdir()) == []
    waiting.add(0, b"first")
    assert sum(1 for _ in waiting.take()) == 20_000
    assert waiting.spilled_bytes == 0
    waiting.close()


def test_no_room_for_the_file_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    waiting = ReorderBuffer(max_bytes=10, folder=tmp_path)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match=r"No space left.*job\.reorder_memory"):
        waiting.add(5, b"x" * 100)
    waiting.close()
