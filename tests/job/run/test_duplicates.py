"""Equal rows are computed once, and each of them is answered once, with its own id."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nvcli.errors import RowError
from nvcli.job.job import Choice, JobResult, Usage, failed
from nvcli.job.planning.duplicates import Duplicates
from nvcli.job.text.prepare import PreparedRow
from prepared_rows import prepared_row


def make_duplicates(**changes: int) -> Duplicates:
    return Duplicates(**{"max_rows": 100, "max_bytes": 10**6, "max_kept_bytes": 10**6, **changes})


def answer(row: PreparedRow) -> JobResult:
    text = f"answer to {row.answer_key!r}"
    usage = Usage(prompt_tokens=9, completion_tokens=3, cached_tokens=2)
    return JobResult(context=row.context, choices=[Choice(index=0, text=text, finish_reason="stop")], usage=usage)


keys = st.sampled_from([None, b"a", b"b", b"c"])
moves = st.lists(st.tuples(keys, st.booleans()) | st.integers(0, 100), max_size=80)


@given(moves, st.sampled_from([0, 1500, 10**6]))
def test_each_row_is_answered_once_and_with_the_answer_of_its_equals(
    moves: list[tuple[bytes | None, bool] | int], max_kept_bytes: int
) -> None:
    """A move is a row that comes, with whether its kind fails; or one of the rows that run is done."""
    duplicates = make_duplicates(max_kept_bytes=max_kept_bytes)
    rows: list[PreparedRow] = []
    running: list[tuple[PreparedRow, bool]] = []
    results: dict[int, JobResult] = {}

    def collect(found: list[JobResult]) -> None:
        for result in found:
            assert result.context.index not in results
            results[result.context.index] = result

    def finish(at: int) -> None:
        row, fails = running.pop(at)
        error = RowError("kv_cache_too_small", "it can never fit") if fails else None
        result = failed(row.context, error) if error else answer(row)
        collect([result])
        duplicates.finish(row, result, error)
        for equal, ready in duplicates.take_ready():
            assert equal.answer_key == row.answer_key is not None
            assert (ready.error is None) == (error is None)
            collect([ready])

    for move in moves:
        if isinstance(move, int):
            if running:
                finish(move % len(running))
            continue
        key, fails = move
        row = prepared_row(len(rows), [1], answer_key=key)
        rows.append(row)
        if duplicates.admit(row):
            assert key is None or key not in [other.answer_key for other, _ in running]
            running.append((row, fails))
        collect([result for _, result in duplicates.take_ready()])
        assert len(rows) == len(results) + len(running) + duplicates.num_rows
    while running:
        finish(0)
    assert (duplicates.num_rows, duplicates.num_bytes) == (0, 0)
    assert sorted(results) == list(range(len(rows)))
    for index, result in results.items():
        assert result.context is rows[index].context
        if result.error is None:
            assert result.choices == answer(rows[index]).choices
            assert result.usage.cached_tokens in (2, 9)
        else:
            assert result.error.message == f"line {index + 1}: it can never fit"


def test_the_latest_answers_are_kept_within_bounds() -> None:
    duplicates = make_duplicates(max_kept_bytes=10_000)
    kinds = [prepared_row(number, [number], answer_key=b"%d" % number) for number in range(100)]
    for row in kinds:
        assert duplicates.admit(row)
        duplicates.finish(row, answer(row), None)
    assert not duplicates.admit(kinds[99])
    assert duplicates.admit(kinds[0])
    ((_, result),) = duplicates.take_ready()
    assert result.usage == Usage(prompt_tokens=9, completion_tokens=3, cached_tokens=9)


def test_failures_are_not_kept() -> None:
    duplicates = make_duplicates()
    row = prepared_row(0, [1], answer_key=b"a")
    assert duplicates.admit(row)
    error = RowError("aborted", "no luck")
    duplicates.finish(row, failed(row.context, error), error)
    assert duplicates.admit(row)


def test_rows_that_wait_for_others_are_bounded() -> None:
    duplicates = make_duplicates(max_rows=2)
    row = prepared_row(0, [1], answer_key=b"a")
    for _ in range(3):
        assert not duplicates.is_full
        duplicates.admit(row)
    assert duplicates.is_full
    duplicates.finish(row, answer(row), None)
    assert not duplicates.is_full
