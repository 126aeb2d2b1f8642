"""A process that makes masks, without being one: what it writes, in which order, and that no answer fails because of
others."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from constrained_requests import END_IDS, load_vocabulary, run_here

from nvcli import grammars
from nvcli.grammars import Vocabulary, grammar_of
from nvcli.runner import compiled_grammars, mask_worker
from nvcli.runner.compiled_grammars import CompiledGrammars, GrammarAnswer
from nvcli.runner.mask_messages import FollowGrammar, MaskOrders, WantMask, answered
from nvcli.runner.mask_worker import MaskWorker
from nvcli.runner.mask_workers import Patience
from nvcli.sampling_params import SamplingParams
from nvcli.structured import Constraint, Structured
from requests_factory import make_request

CHOICE = grammar_of(Structured(choice=["95"]))


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary()


class Worker:
    """A worker and its memory."""

    def __init__(self, vocabulary: Vocabulary, num_rows: int = 12) -> None:
        self.numbers = np.zeros(num_rows, dtype=np.int64)
        self.masks = np.zeros((num_rows, vocabulary.num_words), dtype=np.uint32)
        self.worker = MaskWorker(vocabulary, self.numbers, self.masks)

    def begin(self, *rows: int, grammar: str = CHOICE) -> None:
        self.worker.take(MaskOrders([], [FollowGrammar(row, grammar) for row in rows], []))

    def want(self, *masks: WantMask) -> None:
        self.worker.take(MaskOrders([], [], list(masks)))

    def allowed(self, row: int) -> set[int]:
        return set(np.flatnonzero(np.unpackbits(self.masks[row].view(np.uint8), bitorder="little")).tolist())

    def make_all(self) -> None:
        while not self.worker.is_idle:
            self.worker.make_next()


def want(row: int, number: int = 1, tokens: list[int] | None = None, **fields: Any) -> WantMask:
    values = {"is_free": False, "held_back": [], "opening": None, "is_opened": False, **fields}
    return WantMask(row, number, tokens or [], **values)


def test_masks_are_those_of_the_grammar_and_of_what_is_beside_it(vocabulary: Vocabulary) -> None:
    nine, five = vocabulary.tokenizer.greedy_tokenize("95")
    own = Worker(vocabulary)
    own.begin(*range(6))
    own.want(
        want(0, 7),
        want(1, tokens=[nine]),
        want(2, opening=400),
        want(3, opening=401, is_opened=True),
        want(4, is_free=True, held_back=[0, 2]),
        want(5, held_back=[nine]),
    )
    own.make_all()
    assert [own.allowed(row) for row in (0, 1, 2, 3, 5)] == [{nine}, {five}, {nine, 400}, {401}, {nine}]
    assert own.allowed(4) >= set(range(3, 640)) | {1}
    assert not own.allowed(4) & {0, 2}
    assert own.numbers[:7].tolist() == [answered(number, has_failed=False) for number in (7, 1, 1, 1, 1, 1, 0)]


def test_what_cannot_be_followed_says_so(vocabulary: Vocabulary) -> None:
    own = Worker(vocabulary)
    own.begin(0, grammar="start: nothing")
    own.begin(1)
    own.want(want(0), want(1, tokens=[5]))
    own.make_all()
    assert own.numbers[:2].tolist() == [answered(1, has_failed=True)] * 2
    assert own.allowed(0) >= set(range(640))


def test_answers_whose_last_mask_was_slow_come_last_and_wait_for_two_orders_at_the_most(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, order = Worker(vocabulary), []
    monkeypatch.setattr(mask_worker, "_SLOW_SECONDS", 0.0)
    own.begin(*range(4))
    own.want(want(1))
    own.make_all()
    monkeypatch.setattr(mask_worker, "_SLOW_SECONDS", 60.0)
    monkeypatch.setattr(own.worker, "_make", lambda mask, answer: order.append((mask.row, mask.number)))
    own.want(want(0), want(1, 2), want(2))
    for _ in range(2):
        assert own.worker.next_is_urgent()
        own.worker.make_next()
    assert not own.worker.next_is_urgent()
    own.want(want(0, 2))
    own.worker.make_next()
    own.want(want(0, 3), want(2, 2))
    own.make_all()
    assert order == [(0, 1), (2, 1), (0, 2), (1, 2), (0, 3), (2, 2)]


def test_a_second_thread_goes_on_where_a_mask_is_slow(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes nothing while answers come and go, and nothing else while the first one gets on."""
    own = Worker(vocabulary)
    begun, gate = threading.Event(), threading.Event()
    make = own.worker._make

    def make_slowly(mask: WantMask, answer: GrammarAnswer) -> None:
        if mask.row == 0:
            begun.set()
            gate.wait(60)
        make(mask, answer)

    monkeypatch.setattr(own.worker, "_make", make_slowly)
    own.begin(*range(5))
    own.want(*(want(row) for row in range(5)))
    assert not own.worker._help()
    first = threading.Thread(target=own.worker.make_next)
    first.start()
    assert begun.wait(60)
    time.sleep(2 * mask_worker._SLOW_SECONDS)
    while own.worker._help():
        pass
    assert [bool(own.allowed(row)) for row in range(5)] == [False, True, True, True, True]
    gate.set()
    first.join()
    assert own.worker.is_idle
    assert own.numbers[:5].tolist() == [answered(1, has_failed=False)] * 5


def test_nothing_is_made_for_an_answer_that_has_ended(vocabulary: Vocabulary) -> None:
    """Another one may have its row, and is told none of its tokens."""
    nine, _ = vocabulary.tokenizer.greedy_tokenize("95")
    own = Worker(vocabulary)
    own.begin(0, 1)
    own.want(want(0, 1, [nine]), want(1, 1))
    own.worker.take(MaskOrders([0, 1], [FollowGrammar(0, CHOICE)], [want(0, 2)]))
    own.make_all()
    assert own.allowed(0) == {nine}
    assert own.numbers[:2].tolist() == [answered(2, has_failed=False), 0]


def test_waiting_ends_when_it_costs_what_leaving_rows_out_does() -> None:
    patience = Patience(free_until=10.0, step_seconds=2.0)
    assert patience.ends_at(1, 100) == pytest.approx(10.02)
    assert patience.ends_at(50, 100) == pytest.approx(11.0)


def test_grammars_are_compiled_once_in_a_while(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones are kept, and none for ever."""
    monkeypatch.setattr(compiled_grammars, "_MAX_COMPILED", 2)
    monkeypatch.setattr(compiled_grammars, "_MOST_SERVED", 3)
    compiled: list[str] = []
    make = vocabulary.matcher
    monkeypatch.setattr(vocabulary, "matcher", lambda grammar: (compiled.append(grammar), make(grammar))[1])
    known = CompiledGrammars(vocabulary)
    a, b, c = (grammar_of(Structured(choice=[word])) for word in ("a", "b", "c"))
    for grammar in (a, b, a, a, a, c, a, b):
        GrammarAnswer(grammar, known)
    assert compiled == [a, b, a, c, b]


def test_no_answer_fails_because_others_have_filled_the_memory(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar has 2^12 states. An answer comes through fewer than 100 of them, and 200 are remembered."""
    wanted = grammar_of(Structured(regex="[ab]*a[ab]{11}"))
    constraint = Constraint(grammar=wanted, end_ids=END_IDS)
    sampling = SamplingParams(temperature=50.0)
    found, _ = run_here(
        [
            make_request(i, [5], 30, stop_ids=END_IDS, sampling=sampling, row=i, constraint=constraint)
            for i in range(20)
        ],
        max_num_seqs=8,
    )
    monkeypatch.setattr(grammars, "_MAX_LEXER_STATES", 200)
    own = Worker(load_vocabulary())
    num_anew = 0
    anew = GrammarAnswer._begin_anew

    def count(answer: GrammarAnswer) -> None:
        nonlocal num_anew
        num_anew += 1
        anew(answer)

    monkeypatch.setattr(GrammarAnswer, "_begin_anew", count)
    number = 0
    for tokens, _ in found.values():
        own.begin(0, grammar=wanted)
        for token in [[], *([token] for token in tokens if token not in END_IDS)]:
            number += 1
            own.want(want(0, number, token))
            own.make_all()
            assert own.numbers[0] == answered(number, has_failed=False)
    assert num_anew > 0
