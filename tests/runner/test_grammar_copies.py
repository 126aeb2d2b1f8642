"""Answers under one grammar do not wait for each other's masks, and none fails because of what others have left."""

from __future__ import annotations

import pytest
from constrained_requests import END_IDS, load_vocabulary, run_here

from nvcli import grammars
from nvcli.grammars import GrammarError, Vocabulary, grammar_of
from nvcli.runner import grammar_copies
from nvcli.runner.grammar_copies import GrammarCopies, GrammarCopy
from nvcli.sampling_params import SamplingParams
from nvcli.structured import Constraint, Structured
from requests_factory import make_request

GRAMMAR = grammar_of(Structured(regex="[a-z]+"))


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary()


def take_first(copies: GrammarCopies, grammar: str, vocabulary: Vocabulary) -> GrammarCopy:
    first = copies.first(grammar)
    assert first is not None
    first.compile(vocabulary)
    return copies.take(grammar)


def test_each_running_answer_has_a_copy_of_its_own(vocabulary: Vocabulary) -> None:
    copies = GrammarCopies(max_answers=4)
    taken = [take_first(copies, GRAMMAR, vocabulary), *[copies.take(GRAMMAR) for _ in range(9)]]
    assert len(set(taken)) == 10
    assert copies.first(GRAMMAR) is None
    copies.give_back(taken[3])
    assert copies.take(GRAMMAR) is taken[3]


def test_a_copy_is_compiled_anew_once_in_a_while(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_copies, "_MOST_SERVED", 3)
    copies = GrammarCopies(max_answers=4)
    taken = [take_first(copies, GRAMMAR, vocabulary)]
    for _ in range(3):
        copies.give_back(taken[-1])
        taken.append(copies.take(GRAMMAR))
    assert taken[0] is taken[1] is taken[2] is not taken[3]


def test_a_grammar_that_takes_long_to_compile_is_shared(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By as few answers as may be."""
    monkeypatch.setattr(grammar_copies, "_MOST_SECONDS", 0.0)
    copies = GrammarCopies(max_answers=4)
    taken = [take_first(copies, GRAMMAR, vocabulary), *[copies.take(GRAMMAR) for _ in range(7)]]
    assert sorted(copy.num_answers for copy in set(taken)) == [2, 2, 2, 2]


def test_what_was_used_least_lately_is_forgotten(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_copies, "_MAX_KEPT", 1)
    copies = GrammarCopies(max_answers=1)
    texts = [grammar_of(Structured(choice=[word])) for word in ("a", "b", "c")]
    taken = [take_first(copies, text, vocabulary) for text in texts]
    copies.drop_oldest()
    copies.give_back(taken[0])
    assert [copies.first(text) is None for text in texts] == [False, True, True]


def test_what_cannot_be_compiled_is_tried_once(vocabulary: Vocabulary) -> None:
    copies = GrammarCopies(max_answers=2)
    copy = take_first(copies, "start: nothing", vocabulary)
    assert copies.take("start: nothing") is copy
    with pytest.raises(GrammarError, match="nothing"):
        copy.begin(vocabulary)


def test_no_answer_fails_because_others_have_filled_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar has 2^12 states. An answer comes through fewer than 100 of them, and 200 are remembered."""
    monkeypatch.setattr(grammars, "_MAX_LEXER_STATES", 200)
    constraint = Constraint(grammar=grammar_of(Structured(regex="[ab]*a[ab]{11}")), end_ids=END_IDS)
    sampling = SamplingParams(temperature=50.0)
    found, _ = run_here(
        [
            make_request(i, [5], 30, stop_ids=END_IDS, sampling=sampling, row=i, constraint=constraint)
            for i in range(20)
        ],
        max_num_seqs=2,
    )
    assert {reason for _, reason in found.values()} <= {"stop", "length"}
