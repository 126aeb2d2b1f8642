"""The rows of a program's calls: read no further than memory allows, and tokenized in batches that begin small."""

from __future__ import annotations

import threading
import time

import pytest

from nvcli.errors import RowError
from nvcli.job.job import JobResult, RowContext, failed
from nvcli.llm import call as call_module
from nvcli.llm.call import Call
from nvcli.llm.rows import FIRST_BATCH_ROWS, MAX_QUEUED_ROWS, RowQueue


def rows(number: int) -> list[JobResult]:
    return [failed(RowContext(id=i, index=i, line="", caller=None), RowError("aborted", "")) for i in range(number)]


def test_the_first_batch_after_a_pause_is_small() -> None:
    """Else the engines would wait until hundreds of rows are tokenized."""
    queue, put = RowQueue(), rows(2 * MAX_QUEUED_ROWS)
    taken: list[list[int]] = []
    enough = threading.Event()

    def take() -> None:
        batches = queue.batches()
        for goal in (MAX_QUEUED_ROWS, MAX_QUEUED_ROWS + 50):
            while sum(map(len, taken)) < goal:
                taken.append([row.context.index for row in next(batches)])
            enough.set()

    for row in put[:MAX_QUEUED_ROWS]:
        assert queue.put(row)
    thread = threading.Thread(target=take)
    thread.start()
    assert enough.wait(10)
    sizes = [*map(len, taken)]
    assert sizes == [8, 16, 32, 64, 128, 8]
    for row in put[MAX_QUEUED_ROWS : MAX_QUEUED_ROWS + 50]:
        assert queue.put(row)
    thread.join(10)
    assert len(taken[len(sizes)]) <= FIRST_BATCH_ROWS
    assert [index for batch in taken for index in batch] == [row.context.index for row in put[: MAX_QUEUED_ROWS + 50]]
    queue.close()


def test_answers_that_wait_for_their_turn_count_with_their_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row is slow: rows behind it are read until what waits for it takes too much memory."""
    monkeypatch.setattr(call_module, "MAX_ANSWER_BYTES", 100_000)
    call = Call(order="input", max_rows=1000)
    results = rows(50)
    num_read = 0

    def read() -> None:
        nonlocal num_read
        while num_read < 50 and call.wait_for_room():
            call.add_row(num_read, "x" * 10_000)
            num_read += 1
            if num_read > 1:
                call.take(results[num_read - 1])
        call.end_input(None)

    thread = threading.Thread(target=read)
    thread.start()
    deadline = time.monotonic() + 10
    while num_read < 11 and time.monotonic() < deadline:
        time.sleep(0.005)
    thread.join(0.2)
    assert num_read == 11  # ten that wait, of 10,500 bytes each, and the first
    call.take(results[0])
    for index in range(50):
        result = call.next()
        assert isinstance(result, JobResult)
        assert result.context.index == index
        assert call.take_prompt(index) == "x" * 10_000
    assert call.next() is None
    thread.join(10)
    assert not thread.is_alive()
    assert (call._prompts, call._ready_bytes) == ({}, 0)
