"""How often drafts are right, from few tests and from many."""

from __future__ import annotations

import random

import pytest

from nvcli.engine.draft_rates import DraftRates


def test_each_draft_is_right_given_those_before_it() -> None:
    rng, rates = random.Random(1), DraftRates(4, prior=0.7, prior_rows=5)
    assert rates.shares() == pytest.approx([0.7, 0.49, 0.343, 0.2401])
    chances = [0.9, 0.6, 0.3]
    for _ in range(200):
        counts = []
        for _ in range(16):
            count = 1
            while count < 4 and rng.random() < chances[count - 1]:
                count += 1
            counts.append(count)
        rates.learn(counts, [4] * 16, [])
    assert rates.shares() == pytest.approx([0.9, 0.54, 0.16, 0.05], abs=0.06)


def test_few_tests_of_a_later_draft_say_little() -> None:
    rates = DraftRates(5, prior=0.7, prior_rows=5)
    for _ in range(200):
        rates.learn([3], [3], [])
        rates.learn([2], [3], [])
        rates.learn([1], [3], [])
    before = rates.shares()
    rates.learn([3], [6], [])
    assert before[2] * 0.8 < rates.shares()[2] < before[2]
    assert before[0] == pytest.approx(2 / 3, abs=0.03)
    assert before[1] == pytest.approx(1 / 3, abs=0.03)


def test_looks_count_until_there_are_drafts() -> None:
    rates = DraftRates(3, prior=0.0, prior_rows=16)
    for _ in range(300):
        rates.look(1, 3)
    assert rates.shares() == pytest.approx([1, 0, 0], abs=0.03)
    for _ in range(300):
        rates.learn([1, 2], [2, 2], [])
    assert rates.shares()[0] == pytest.approx(0.5, abs=0.02)


def test_the_surest_drafts_give_at_most_what_is_right() -> None:
    rates = DraftRates(5, prior=0.7, prior_rows=5)
    worst, best = 1.7, 2.0
    assert worst < rates.surest(2.0, 6) < best
    for given in (best, worst):
        for _ in range(60):
            rates.learn_surest(2.0, 6, [1] * round(10 * (2 - given)) + [2] * round(10 * (given - 1)))
        assert rates.surest(2.0, 6) == pytest.approx(given, abs=0.02)
    for _ in range(60):
        rates.learn([1] * 64, [6] * 64, [])
    assert rates.surest(2.0, 6) == pytest.approx(1, abs=0.02)
