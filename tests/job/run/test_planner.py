"""Every row goes to an engine once, none waits for ever, and rows that begin alike go together."""

from __future__ import annotations

import random
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvcli.job.job import RowContext
from nvcli.job.planning.planner import Planner
from nvcli.job.text.prepare import PreparedRow
from nvcli.llm.call import Call
from prepared_rows import prepared_row

BLOCK_SIZE = 2


def make_planner(**changes: object) -> Planner:
    values: dict[str, object] = {
        "block_size": BLOCK_SIZE,
        "max_rows": 10**6,
        "max_bytes": 10**9,
        "max_passed_over": 10**6,
    }
    return Planner(**{**values, **changes})  # type: ignore[arg-type]


def take_all(planner: Planner, replica: int = 0) -> list[PreparedRow]:
    taken = []
    while (row := planner.take(replica)) is not None:
        taken.append(row)
    return taken


def indexes(rows: list[PreparedRow]) -> list[int]:
    return [row.context.index for row in rows]


def test_rows_of_a_merged_adapter_go_together_to_a_replica() -> None:
    """The largest group first; two replicas take up different groups while there are any."""
    adapters = [1, 2, 0, 2, 1, 2, 3, 0, 2, 1, 3]

    def filled(num_replicas: int, **changes: object) -> Planner:
        planner = make_planner(num_replicas=num_replicas, merged_adapters=(1, 2), block_size=None, **changes)
        for index, adapter in enumerate(adapters):
            planner.add(prepared_row(index, [index], adapter=adapter))
            planner.check_integrity()
        return planner

    assert [row.adapter for row in take_all(filled(1))] == [0, 3, 3, 0, 2, 2, 2, 2, 1, 1, 1]
    planner = filled(2)
    first = [(planner.take(0), planner.take(1)) for _ in range(3)]
    assert [(one.adapter, other.adapter) for one, other in first if one and other] == [(0, 2), (3, 2), (3, 2)]
    planner.add(prepared_row(20, [20], adapter=2))
    assert [row.adapter for row in take_all(planner, 1)] == [2, 2, 1, 1, 1, 0]
    passed = take_all(filled(1, max_passed_over=2))
    assert indexes(passed)[:4] == [2, 6, 0, 1], "a group ends where another row has waited long enough"


# Few different tokens, so that prompts share prefixes of every length, end within each other and are equal.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)
lengths = st.sampled_from([None, 1, 7, 500])
moves = st.lists(st.tuples(prompts, lengths) | st.integers(0, 2), max_size=120)


@given(moves, st.sampled_from([0, 1, 3, 10, 10**6]), st.integers(1, 3), st.sampled_from([None, BLOCK_SIZE]))
def test_each_row_once_and_none_passed_over_too_often(
    moves: list[tuple[list[int], int | None] | int], max_passed_over: int, num_replicas: int, block_size: int | None
) -> None:
    planner = make_planner(max_passed_over=max_passed_over, num_replicas=num_replicas, block_size=block_size)
    waiting: dict[int, PreparedRow] = {}
    passed_over: dict[int, int] = {}
    num_rows = 0

    def take(replica: int) -> None:
        row = planner.take(replica)
        planner.check_integrity()
        if row is None:
            assert not waiting
            return
        index = row.context.index
        assert waiting.pop(index) is row  # it was there, and was not taken before
        for other in waiting:
            if other < index:
                passed_over[other] += 1
                assert passed_over[other] <= max_passed_over

    for move in moves:
        if isinstance(move, int):
            take(move % num_replicas)
        else:
            prompt, max_tokens = move
            waiting[num_rows] = prepared_row(num_rows, prompt, max_tokens=max_tokens)
            passed_over[num_rows] = 0
            planner.add(waiting[num_rows])
            planner.check_integrity()
            num_rows += 1
    while waiting:
        take(len(waiting) % num_replicas)
    assert (planner.num_rows, planner.num_bytes) == (0, 0)
    assert planner.take() is None


@given(moves)
def test_without_a_plan_rows_keep_their_order(moves: list[tuple[list[int], int | None] | int]) -> None:
    planner = make_planner(block_size=None, longest_first=False, num_replicas=3)
    taken, num_rows = [], 0
    for move in moves:
        if isinstance(move, int):
            row = planner.take(move)
            if row is not None:
                taken.append(row)
        else:
            planner.add(prepared_row(num_rows, move[0], max_tokens=move[1]))
            num_rows += 1
    assert indexes(taken + take_all(planner)) == list(range(num_rows))


def test_the_bounds_of_the_window() -> None:
    planner = make_planner(max_rows=3, max_bytes=100)
    for number in range(3):
        assert not planner.is_full
        planner.add(prepared_row(number, [1, 2, 3]))
    assert planner.is_full
    planner.take()
    assert not planner.is_full
    planner.add(prepared_row(3, [7] * 50))
    assert planner.is_full
    assert planner.num_bytes == 2 * 12 + 200
    take_all(planner)
    assert not planner.is_full


@pytest.mark.parametrize(
    ("changes", "order"),
    [
        ({}, [0, 1, 5, 3, 2, 4, 6]),
        ({"block_size": None}, [0, 1, 3, 5, 2, 4, 6]),
        ({"longest_first": False}, [0, 1, 4, 5, 2, 3, 6]),
        ({"longest_first": False, "block_size": None}, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_rows_of_an_adapter_go_one_after_the_other_unless_order_is_kept(
    changes: dict[str, object], order: list[int]
) -> None:
    """Whatever they have in common with others; among them those that begin alike are together."""
    adapters = [0, 2, 1, 2, 1, 2, 0]
    prompts = [[1, 2, 3], [1, 2, 3], [9, 9, 9], [8, 8, 8], [1, 2, 4], [1, 2, 5], [7, 7, 7]]
    planner = make_planner(**changes)
    for index, (adapter, ids) in enumerate(zip(adapters, prompts, strict=True)):
        planner.add(prepared_row(index, ids, adapter=adapter))
        planner.check_integrity()
    assert indexes(take_all(planner)) == order


def test_rows_that_begin_alike_go_one_after_the_other() -> None:
    planner = make_planner()
    rng = random.Random(0)
    prefixes = [[100 + number] * 6 for number in range(20)]
    order = [number for number in range(20) for _ in range(10)]
    rng.shuffle(order)
    for index, number in enumerate(order):
        planner.add(prepared_row(index, [*prefixes[number], rng.randrange(50), 1, 2]))
    taken = [order[row.context.index] for row in take_all(planner)]
    runs = [number for number, _ in groupby(taken)]
    assert runs == list(dict.fromkeys(order))  # one run for each prefix, in the order in which they came


def test_the_longest_common_prefix_goes_on_first() -> None:
    planner = make_planner()
    a, b, c = [1, 1], [2, 2], [3, 3]
    prompts = [[*a, *b, 5], [9, 9, 9], [*a, *c, 5], [*a, *b, 6], [*a, 7], [*a, *c, 6]]
    for index, prompt in enumerate(prompts):
        planner.add(prepared_row(index, prompt))
    assert indexes(take_all(planner)) == [0, 3, 2, 5, 4, 1]


def test_only_whole_blocks_and_not_the_last_token_count() -> None:
    planner = make_planner(block_size=4)
    prompts = [[1, 2, 3, 4], [5, 5, 5, 5, 5], [1, 2, 3, 4], [1, 2, 3, 9, 9], [5, 5, 5, 5, 6]]
    for index, prompt in enumerate(prompts):
        planner.add(prepared_row(index, prompt))
    assert indexes(take_all(planner)) == [0, 1, 4, 2, 3]


def test_rows_that_come_while_their_group_runs_join_it() -> None:
    planner = make_planner()
    planner.add(prepared_row(0, [1, 1, 0]))
    planner.add(prepared_row(1, [2, 2, 0]))
    assert indexes([planner.take()]) == [0]  # type: ignore[list-item]
    planner.add(prepared_row(2, [1, 1, 5]))
    assert indexes(take_all(planner)) == [2, 1]


def test_long_answers_start_first_and_equals_keep_their_order() -> None:
    planner = make_planner()
    for index, max_tokens in enumerate([100, 2000, 110, None, 1500, 1]):
        planner.add(prepared_row(index, [index, 1, 2], max_tokens=max_tokens))
    assert indexes(take_all(planner)) == [3, 1, 4, 0, 2, 5]


def test_rows_whose_caller_wants_them_in_order_take_their_turn() -> None:
    planner = make_planner()
    in_order, as_done = Call(order="input", max_rows=9), Call(order="completion", max_rows=9)
    for index, max_tokens in enumerate([1, 2000, 1, 500, 100, None]):
        context = RowContext(id=index, index=index, line="", caller=as_done if index >= 3 else in_order)
        planner.add(prepared_row(index, [index, 1, 2], max_tokens=max_tokens, context=context))
    assert indexes(take_all(planner)) == [0, 1, 2, 5, 3, 4]


def test_replicas_keep_to_their_prefixes_and_none_is_left_without_work() -> None:
    planner = make_planner(num_replicas=2)
    for index in range(40):
        planner.add(prepared_row(index, [index % 2, 1, index]))
    taken = {0: [], 1: []}  # type: dict[int, list[int]]
    for turn in range(40):
        row = planner.take(turn % 2)
        assert row is not None
        taken[turn % 2].append(row.context.index % 2)
    assert taken == {0: [0] * 20, 1: [1] * 20}
    for index in range(10):
        planner.add(prepared_row(index, [1, 1, index]))
    assert len([planner.take(0), *take_all(planner, 1)]) == 10  # another's prefix is better than nothing


@pytest.mark.parametrize("max_passed_over", [0, 5])
def test_the_oldest_row_goes_when_it_was_passed_over_too_often(max_passed_over: int) -> None:
    planner = make_planner(max_passed_over=max_passed_over)
    planner.add(prepared_row(0, [9, 9, 9], max_tokens=1))
    for index in range(1, 20):
        planner.add(prepared_row(index, [1, 1, index], max_tokens=100))
    assert indexes(take_all(planner)).index(0) == max_passed_over
