"""The rows of a program's calls come to the tokenizer in batches that let the engines begin soon."""

from __future__ import annotations

import threading

from nvcli.errors import RowError
from nvcli.jobs.job import JobResult, Place, failed
from nvcli.llm.rows import FIRST_BATCH_ROWS, MAX_QUEUED_ROWS, RowQueue


def rows(number: int) -> list[JobResult]:
    return [failed(Place(id=i, index=i, line="", caller=None), RowError("aborted", "")) for i in range(number)]


def test_the_first_batch_after_a_pause_is_small() -> None:
    """Else the engines would wait until hundreds of rows are tokenized."""
    queue, put = RowQueue(), rows(2 * MAX_QUEUED_ROWS)
    taken: list[list[int]] = []
    enough = threading.Event()

    def take() -> None:
        batches = queue.batches()
        for goal in (MAX_QUEUED_ROWS, MAX_QUEUED_ROWS + 50):
            while sum(map(len, taken)) < goal:
                taken.append([row.place.index for row in next(batches)])
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
    assert [index for batch in taken for index in batch] == [row.place.index for row in put[: MAX_QUEUED_ROWS + 50]]
    queue.close()
