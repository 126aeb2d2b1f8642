"""A process that makes masks, without being one: what it writes, in which order, and that no answer fails because of
others."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from constrained_requests import END_IDS, load_vocabulary, run_here
from nvcli.core import grammars
from nvcli.core.grammars import Vocabulary, grammar_of
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.structured import Constraint, Structured
from nvcli.worker.masks import mask_worker
from nvcli.worker.masks.mask_messages import (
    WHOLE_RUN,
    FollowGrammar,
    MaskOrders,
    MaskTable,
    WantMask,
    answered,
    next_token,
)
from nvcli.worker.masks.mask_worker import CompiledGrammars, GrammarAnswer, MaskWorker, OrderReader, serve
from requests_factory import make_request

CHOICE = grammar_of(Structured(choice=["95"]))


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary()


class Worker:
    """A worker and its memory."""

    def __init__(self, vocabulary: Vocabulary, num_rows: int = 12) -> None:
        self.table = MaskTable.empty(num_rows, vocabulary.num_words)
        self.numbers, self.masks = self.table.numbers, self.table.masks
        self.worker = MaskWorker(vocabulary, self.table)

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


def test_an_end_of_sequence_token_that_is_no_special_one_comes_at_the_end_alone(vocabulary: Vocabulary) -> None:
    """As text it could stand in a string, and would end the answer there."""
    nine, five = vocabulary.tokenizer.greedy_tokenize("95")
    with_plain_end = load_vocabulary(end_ids=[0, five])
    assert (vocabulary.text_end_ids, with_plain_end.text_end_ids) == ([], [five])
    grammar = grammar_of(Structured(regex="[59]{2,3}"))
    own, ending = Worker(vocabulary), Worker(with_plain_end)
    for worker in (own, ending):
        worker.begin(0, grammar=grammar)
        for number, tokens in enumerate(([], [nine], [nine])):
            worker.want(want(0, number, tokens))
            worker.make_all()
            assert (five in worker.allowed(0)) == (worker is own or number == 2)
            assert nine in worker.allowed(0)
    assert 0 in own.allowed(0)
    assert 0 in ending.allowed(0)


def test_masks_behind_one_more_token_are_asked_for_by_the_memory(vocabulary: Vocabulary) -> None:
    """Each worker reads its own rows, each of them once."""
    nine, five = vocabulary.tokenizer.greedy_tokenize("95")
    table = MaskTable.empty(6, vocabulary.num_words)
    workers = [MaskWorker(vocabulary, table, first=first, step=2) for first in range(2)]
    nothing = MaskOrders([], [], [])

    def make_all(worker: MaskWorker, orders: MaskOrders = nothing) -> None:
        worker.take(orders)
        while not worker.is_idle:
            worker.make_next()

    for first, worker in enumerate(workers):
        rows = range(first, 6, 2)
        make_all(worker, MaskOrders([], [FollowGrammar(row, CHOICE) for row in rows], [want(row) for row in rows]))
    asked = np.array([1, 4])
    table.next_tokens[asked] = next_token(np.array([2, 1 << 33]), np.array([nine, nine]))
    for worker in (*workers, *workers):
        make_all(worker)
    assert table.numbers.tolist() == [2, 4, 2, 2, 1 << 34, 2]
    for row in range(6):
        token = five if row in asked else nine
        assert table.masks[row, token // 32] == 1 << token % 32
        assert np.count_nonzero(table.masks[row]) == 1


def test_tokens_that_must_come_next_are_found_with_the_mask_of_the_first(vocabulary: Vocabulary) -> None:
    """Whether the answer takes them at once, one by one, or with others behind them."""
    tokens = vocabulary.tokenizer.greedy_tokenize("9594")
    grammar = grammar_of(Structured(regex="9594[0-3]{2}95"))
    own = Worker(vocabulary)
    own.worker = MaskWorker(vocabulary, own.table, finds_runs=True)
    own.begin(*range(4), grammar=grammar)
    own.want(*(want(row) for row in range(3)), want(3, held_back=[600]))
    own.make_all()
    assert own.table.runs[:3, :5].tolist() == [[4, *tokens]] * 3
    assert own.table.runs[3, 0] == 0
    assert own.allowed(0) == {tokens[0]}
    digits = {vocabulary.tokenizer.greedy_tokenize(digit)[0] for digit in "0123"}

    own.want(want(0, 2, [WHOLE_RUN]), *(want(1, number + 2, [token]) for number, token in enumerate(tokens)))
    own.make_all()
    assert own.allowed(0) == own.allowed(1) == digits
    assert own.table.runs[:2, 0].tolist() == [0, 0]
    zero = vocabulary.tokenizer.greedy_tokenize("0")
    own.want(want(0, 3, zero), want(0, 4, zero))
    own.make_all()
    assert own.table.runs[0, :3].tolist() == [2, *vocabulary.tokenizer.greedy_tokenize("95")]
    own.want(want(0, 5, [WHOLE_RUN]))
    own.make_all()
    assert own.allowed(0) == set(END_IDS)

    own.want(want(1, 6, zero))
    own.want(want(2, 2, [*tokens, *zero]))
    own.make_all()
    assert own.allowed(1) == own.allowed(2) == digits
    assert own.numbers[:3].tolist() == [answered(number, has_failed=False) for number in (5, 6, 2)]


class ShortOfRoom:
    """A matcher that cannot consume one of the tokens."""

    def __init__(self, matcher: Any, token: int) -> None:
        self._matcher, self._token = matcher, token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def consume_token(self, token: int) -> bool:
        return token != self._token and bool(self._matcher.consume_token(token))

    def consume_tokens(self, tokens: list[int]) -> bool:
        return self._token not in tokens and bool(self._matcher.consume_tokens(tokens))


def test_an_answer_that_cannot_take_a_forced_token_fails_there_and_not_before(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = vocabulary.tokenizer.greedy_tokenize("9584")
    compile_one = CompiledGrammars.compile
    monkeypatch.setattr(
        CompiledGrammars, "compile", lambda self, text: ShortOfRoom(compile_one(self, text), tokens[-1])
    )
    monkeypatch.setattr(CompiledGrammars, "begin", lambda self, text: self.compile(text))
    own = Worker(vocabulary)
    own.worker = MaskWorker(vocabulary, own.table, finds_runs=True)
    own.begin(0, grammar=grammar_of(Structured(regex="9584[0-3]{2}")))
    for number, token in enumerate([[], *([token] for token in tokens)]):
        own.want(want(0, number, token))
        own.make_all()
        assert own.numbers[0] == answered(number, has_failed=number == len(tokens))
        assert own.table.runs[0, 0] == 0
        assert own.allowed(0) == {tokens[number]} if number < len(tokens) else set(range(640))


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


def test_a_worker_looks_at_the_memory_by_itself_and_says_when_it_does_not(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    nine, _ = vocabulary.tokenizer.greedy_tokenize("95")
    own = Worker(vocabulary)
    own.begin(0)
    own.want(want(0))
    read_fd, write_fd = os.pipe()
    orders = OrderReader(read_fd, stays_awake=True)
    thread = threading.Thread(target=serve, args=(own.worker, orders), daemon=True)

    def wait_until(happens: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not happens() and time.monotonic() < deadline:
            time.sleep(0.0005)
        assert happens()

    monkeypatch.setattr(mask_worker, "_AWAKE_SECONDS", 3600.0)
    thread.start()
    wait_until(lambda: own.numbers[0] == 2)

    def ask(number: int, token: int) -> None:
        own.table.next_tokens[0] = next_token(np.array(number), np.array(token))

    ask(2, nine)
    wait_until(lambda: own.numbers[0] == 4)
    assert not own.table.is_asleep[0]
    monkeypatch.setattr(mask_worker, "_NAP_MILLISECONDS", 3_600_000.0)
    orders._awake_seconds = 0.0
    ask(3, 0)
    wait_until(lambda: own.numbers[0] // 2 == 3 and own.table.is_asleep[0])
    time.sleep(0.01)  # it looks once more
    ask(4, 0)
    message = msgspec.msgpack.encode(MaskOrders([], [], []))
    os.write(write_fd, struct.pack("I", len(message)) + message)
    wait_until(lambda: own.numbers[0] // 2 == 4)
    os.close(write_fd)
    thread.join()
    os.close(read_fd)
    assert not own.table.is_asleep[0]


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


def test_grammars_are_compiled_once_in_a_while(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones are kept, and none for ever."""
    monkeypatch.setattr(mask_worker, "MAX_COMPILED", 2)
    monkeypatch.setattr(mask_worker, "_MOST_SERVED", 3)
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
