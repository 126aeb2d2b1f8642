"""Threads that make masks: who is made alone, how long a step waits, and what is seen of an answer that is gone."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from nvcli.grammars import Vocabulary, grammar_of
from nvcli.messages import SlotConstraint
from nvcli.runner import mask_maker
from nvcli.runner.followed_answer import FollowedAnswer
from nvcli.runner.grammar_copies import GrammarCopy
from nvcli.runner.mask_maker import MaskMaker, Patience
from nvcli.structured import Structured

END_IDS = [0, 2]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    from nvcli.demo import demo_path

    return Vocabulary.load(demo_path(), vocab_size=640, end_ids=END_IDS)


def make_answer(row: int, **fields: Any) -> FollowedAnswer:
    return FollowedAnswer(
        constraint=SlotConstraint(grammar=0, end_ids=END_IDS),
        copy=GrammarCopy(grammar_of(Structured(choice=["95"])), num_served=1),
        mask_row=row,
        prompt_len=1,
        min_tokens=0,
        end_ids=frozenset(END_IDS),
        is_free=False,
        num_opening=None,
        last_ids=deque(maxlen=0),
        **fields,
    )


def test_waiting_ends_when_it_costs_what_leaving_rows_out_does() -> None:
    patience = Patience(free_until=10.0, step_seconds=2.0)
    assert patience.ends_at(1, 100) == pytest.approx(10.02)
    assert patience.ends_at(50, 100) == pytest.approx(11.0)


def test_masks_are_those_of_the_grammar(vocabulary: Vocabulary) -> None:
    masks = np.zeros((6, vocabulary.num_words), dtype=np.uint32)
    maker = MaskMaker(vocabulary, masks, num_cores=2)
    answers = [make_answer(row) for row in (5, 0, 3)]
    maker.begin(answers)
    maker.wait(answers, 3, None)
    (nine, five) = vocabulary.tokenizer.greedy_tokenize("95")
    assert all(allowed_tokens(masks[answer.mask_row]) == {nine} for answer in answers)
    answers[1].take(nine)
    assert [answer.is_ready for answer in answers] == [True, False, True]
    maker.begin(answers[1:2])
    maker.wait(answers, 3, None)
    assert allowed_tokens(masks[0]) == {five}
    assert not masks[[1, 2, 4]].any()


def allowed_tokens(words: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_answers_whose_masks_were_slow_are_made_alone_and_last(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[list[int]] = []

    def note(group: Sequence[FollowedAnswer], *_: object) -> None:
        groups.append([answer.mask_row for answer in group])

    monkeypatch.setattr(mask_maker, "_make", note)
    monkeypatch.setattr(mask_maker, "_MIN_THREADS", 1)
    maker = MaskMaker(vocabulary, np.zeros((20, vocabulary.num_words), dtype=np.uint32), num_cores=1)
    answers = [make_answer(row, is_slow=row in (1, 4)) for row in range(9)]
    maker.begin(answers)
    maker.wait(answers, 9, None)
    assert groups == [[0, 2, 3, 5], [6, 7, 8], [1], [4]]


def test_nobody_waits_for_an_answer_that_is_gone(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in work until the thread is done with it, or sees that it is gone."""
    gate = threading.Event()
    make = mask_maker._make

    def make_later(group: Sequence[FollowedAnswer], *arguments: Any) -> None:
        gate.wait(60)
        make(group, *arguments)

    monkeypatch.setattr(mask_maker, "_make", make_later)
    monkeypatch.setattr(mask_maker, "_MIN_THREADS", 1)
    masks = np.zeros((2, vocabulary.num_words), dtype=np.uint32)
    maker = MaskMaker(vocabulary, masks, num_cores=1)
    answers = [make_answer(0), make_answer(1, is_slow=True)]
    maker.begin(answers)
    maker.abandon(answers[1])
    assert answers[1].is_in_work
    gate.set()
    maker.wait(answers, 2, None)
    assert masks[0].any()
    assert not masks[1].any()
