"""Answers that are followed together, as arrays: each asks for the masks that it would ask for if followed alone. And
their rows are spread over the processes."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from nvcli.core.messages import NOT_FINITE, SlotSampling
from nvcli.core.structured import Constraint
from nvcli.worker.masks.answer_table import AnswerTable, FollowedAnswer
from nvcli.worker.masks.mask_messages import WHOLE_RUN, WantMask
from nvcli.worker.masks.mask_rows import MaskRowAllocator, num_mask_rows

END_IDS = [0, 2]
MARK, OPENING = [7, 8], [5]
SIZE = 6


def make_answer(rng: random.Random, row: int) -> FollowedAnswer:
    starts_after = rng.choice([[], MARK])
    opens_with = rng.choice([[], OPENING]) if starts_after else []
    min_tokens = rng.choice([0, 0, 4])
    constraint = Constraint(
        grammar="",
        end_ids=END_IDS,
        starts_after=starts_after,
        must_begin=rng.random() < 0.5,
        opens_with=opens_with,
    )
    stop_ids = END_IDS if min_tokens else []
    return FollowedAnswer(row, constraint, SlotSampling(prompt_len=3, min_tokens=min_tokens, stop_ids=stop_ids))


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_followed_together_as_alone(seed: int) -> None:
    rng = random.Random(seed)
    table = AnswerTable(SIZE, SIZE)
    table.use_end_ids(END_IDS)
    alone: dict[int, FollowedAnswer] = {}
    """Those that are followed alone, by slot."""
    num_together = 0
    for _ in range(400):
        for slot in range(SIZE):
            if slot in alone and rng.random() < 0.03:
                row = alone.pop(slot).row
                assert table.leave(slot) == row
            elif slot not in alone and rng.random() < 0.5:
                row = next(row for row in range(SIZE) if all(answer.row != row for answer in alone.values()))
                alone[slot] = make_answer(rng, row)
                table.enter(slot, copy.deepcopy(alone[slot]))
        for slot, answer in alone.items():
            if rng.random() < 0.1:  # what another rank says of it, beginning with what is known
                num_known, tokens = rng.randrange(3), [rng.randrange(3, 9) for _ in range(3)]
                num_known = min(num_known, answer.num_tokens)
                table.take_known(slot, 3 + answer.num_tokens - num_known, np.array([1] * num_known + tokens))
                for token in tokens:
                    answer.take(token)
        asking = np.array([slot for slot in alone if rng.random() < 0.8], dtype=np.int64)
        expected = {}
        for slot in asking.tolist():
            if alone[slot].is_due:
                expected[alone[slot].row] = alone[slot].want_mask(int(table.wanted[alone[slot].row]) + 1)
        due, orders = table.want(table.rows(asking))
        num_together += len(due)
        found = {order.row: order for order in orders}
        for row in due.tolist():
            tokens = [int(table.last_tokens[row])]
            found[row] = WantMask(row, int(table.wanted[row]), tokens, False, [], None, False)
        assert found == expected
        chosen = [slot for slot in asking.tolist() if rng.random() < 0.9]
        tokens = [rng.choice([*range(3, 9), 1, END_IDS[0], NOT_FINITE]) for _ in chosen]
        for slot, token in zip(chosen, tokens, strict=True):
            alone[slot].take(token)
        table.take(table.rows(np.array(chosen, dtype=np.int64)), np.array(tokens, dtype=np.int64))
        assert len(table) == len(alone)
    assert num_together > 100


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_that_begins_anew_tells_all_tokens_of_its_grammar_once_more(seed: int) -> None:
    """At any time: what a process was told since an answer last began are the tokens of its grammar, in their order, up
    to each mask that is asked for; and the mask that was not there when it began anew is asked for again. In between it
    is in runs, which it takes bit by bit, as they are sampled or known, or leaves."""
    rng = random.Random(seed)
    num_anew = num_steady = num_whole = num_left = 0
    for _ in range(150):
        answer = make_answer(rng, 0)
        twin = copy.deepcopy(answer)
        table = AnswerTable(1, 1)
        table.use_end_ids(END_IDS)
        table.enter(0, answer)
        tokens, own, told = [], [], []
        run: list[int] = []
        """The run that was begun last."""
        rest: list[int] = []
        """Its tokens that the answer does not have."""
        has_mask = True
        while not twin.is_over and len(tokens) < 25:
            due, orders = table.want(np.array([0]))
            num_steady += len(due)
            if orders or len(due):
                asked = orders[0].tokens if orders else [int(table.last_tokens[0])]
                if asked[:1] == [WHOLE_RUN]:
                    asked = run + asked[1:]
                    num_whole += 1
                told += asked
                assert told == own
                has_mask = rng.random() < 0.7
            if not rest and has_mask and table.may_begin_run(np.array([0])) and rng.random() < 0.3:
                run = [rng.randrange(3, 9) for _ in range(rng.randint(1, 6))]
                rest = run.copy()
                table.begin_run(0, run.copy())
            if rng.random() < 0.2:
                num_anew += 1
                rest = []
                before = int(table.wanted[0])
                table.follow_anew(0, lambda _, start, end, of=tokens: of[start - 3 : end - 3], has_mask=has_mask)
                told = []
                if not has_mask:
                    (order,) = table.want(np.array([0]))[1]
                    assert (order.number, order.tokens) == (before + 1, own)
                    told = own.copy()
            has_mask = True
            some = [rng.choice([*range(3, 9), 1, END_IDS[0]])]
            if rest and rng.random() < 0.9:
                some = rest[: rng.randint(1, len(rest))]
                rest = rest[len(some) :]
            elif rest:
                some, rest = [10, 11], []
                num_left += 1
            if len(some) == 1:
                table.take(np.array([0]), np.array(some))
            else:
                known = tokens[len(tokens) - min(len(tokens), rng.randrange(3)) :] + some
                table.take_known(0, 3 + len(tokens) + len(some) - len(known), np.array(known))
            for token in some:
                num_unread = len(twin.unread)
                twin.take(token)
                own += twin.unread[num_unread:]
                tokens.append(token)
    assert num_anew > 100
    assert num_steady > 100
    assert num_whole > 20
    assert num_left > 5


def test_the_rows_of_one_grammar_are_those_of_different_processes() -> None:
    places = MaskRowAllocator(10, 4)
    rows = [places.take("a").row for _ in range(4)]
    assert {row % 4 for row in rows} == {0, 1, 2, 3}
    places.give_back(rows[0])
    others = [places.take("b").row for _ in range(3)]
    assert others[0] % 4 == rows[0] % 4, "the process with the fewest answers"
    others.append(places.take("a").row)
    assert others[-1] % 4 == rows[0] % 4, "none of its grammar"
    rest = [places.take("b").row for _ in range(3)]
    assert sorted([*rows[1:], *others, *rest]) == list(range(10))


def test_most_answers_find_their_grammar_compiled() -> None:
    """And no process has many more answers than others, with fewer running answers than twice the grammars."""
    rng, num_found, num_begun = random.Random(1), 0, 2000
    places, grammars = MaskRowAllocator(num_mask_rows(64), 8), [str(number) for number in range(40)]
    compiled: set[tuple[str, int]] = set()
    rows: list[int] = []
    for number in range(num_begun):
        if len(rows) == 64:
            places.give_back(rows.pop(rng.randrange(64)))
        grammar = grammars[number % len(grammars)]
        rows.append(places.take(grammar).row)
        found = (grammar, rows[-1] % 8)
        num_found += found in compiled
        compiled.add(found)
        loads = [sum(row % 8 == worker for row in rows) for worker in range(8)]
        assert max(loads) <= len(rows) / 8 * 1.25 + 2
    assert num_found > 0.9 * num_begun
