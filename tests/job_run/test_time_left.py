"""The time left and the percentage hold where rows differ in length: short answers end first and say little of others.

The estimate is judged from a fifth of the time on, in runs on a simulated machine.
"""

from __future__ import annotations

import random

import pytest

from nvcli.job_run.answer_lengths import AnswerLengths, ReadTotals, bin_middle, bin_of
from nvcli.job_run.progress.display import rates_text
from nvcli.job_run.progress.forecast import RunningSample, forecast
from nvcli.job_run.progress.run_status import RunStatus
from nvcli.job_run.progress.survival import Survival
from prepared_rows import prepared_row
from simulated_run import FakeRow, Machine, simulate

GPU = Machine(fixed=0.010, each=1.5e-4, prompt=2e-5)
"""Weights and samples take about half of a full step each."""


def _lengths(kind: str) -> list[FakeRow]:
    rng = random.Random(7)
    match kind:
        case "uniform":
            return [FakeRow(rng.randint(1, 400)) for _ in range(2500)]
        case "two groups":
            return [FakeRow(1000 if rng.random() < 0.1 else 10) for _ in range(3000)]
        case "two groups that ask":
            return [FakeRow(most, max_tokens=most) for most in rng.choices((10, 1000), (9, 1), k=3000)]
        case "geometric":
            return [FakeRow(1 + int(rng.expovariate(1 / 100))) for _ in range(4000)]
        case "all at max_tokens":
            return [FakeRow(256, max_tokens=256) for _ in range(1500)]
        case "some at max_tokens":
            return [FakeRow(1 + int(rng.expovariate(1 / 300)), max_tokens=256) for _ in range(2500)]
        case "long ones last":
            return [FakeRow(8, max_tokens=16)] * 6000 + [FakeRow(800, max_tokens=1600)] * 300
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        "uniform",
        "two groups",
        "two groups that ask",
        "geometric",
        "all at max_tokens",
        "some at max_tokens",
        "long ones last",
    ],
)
def test_the_estimate_holds_after_a_fifth_of_the_time(kind: str) -> None:
    looks = simulate(_lengths(kind), GPU, slots=64)
    total = looks[0][0]
    assert total > 60
    judged = 0
    for left, status in looks:
        done = 1 - left / total
        if 0.2 <= done <= 0.8:
            assert status.eta_seconds == pytest.approx(left, rel=0.25), f"{kind}: at {done:.0%}"
            # Of the whole time: work goes more slowly when few samples are left.
            assert status.share_done == pytest.approx(done, abs=0.15), f"{kind}: at {done:.0%}"
            judged += 1
        elif done > 0.8:
            assert status.eta_seconds is not None
            assert abs(status.eta_seconds - left) < 0.05 * total, f"{kind}: at {done:.0%}"
    assert judged > 30


def test_rows_that_are_not_read_yet_are_like_those_that_were() -> None:
    looks = simulate(_lengths("uniform"), GPU, slots=64, rows_ahead=500)
    total = looks[0][0]
    for left, status in looks:
        if 0.2 <= 1 - left / total <= 0.8:
            assert status.eta_seconds == pytest.approx(left, rel=0.25)


def test_it_says_at_least_while_no_answer_has_come_to_its_length() -> None:
    # One wave: nothing ends before all do. Nobody can know, and the estimate must not pretend to.
    looks = simulate([FakeRow(1000) for _ in range(60)], GPU, slots=64)
    total = looks[0][0]
    for left, status in looks:
        if left > 0.5 * total:
            assert status.eta_is_least
            assert status.eta_seconds is not None
            assert 0 < status.eta_seconds <= left
            assert f"at least {status.eta_seconds:.1f}s left" in rates_text(status)
    # Several waves: once the first one has ended, the length is known.
    looks = simulate([FakeRow(300) for _ in range(600)], GPU, slots=64)
    assert looks[0][1].eta_is_least
    assert not looks[len(looks) // 2][1].eta_is_least


def test_answers_that_run_count_towards_the_length() -> None:
    # Of 100 samples 50 ended at 10, and 50 run at 1,000.
    survival = Survival({10: 50}, {}, {bin_of(1000): 50.0})
    assert survival.length(0.4, age=0, most=10_000) == 10
    assert survival.length(0.6, age=0, most=10_000) > 1000
    assert survival.length(0.6, age=0, most=1200) == 1200
    # All that may have 100 tokens come to them: nothing ended, and nothing can be longer.
    survival = Survival({}, {bin_of(100): 50}, {20: 10.0})
    assert survival.length(0.01, age=20, most=100) == 100
    assert survival.seen >= 98


def test_rows_that_ask_for_more_than_those_before_come_to_the_same_share() -> None:
    read, ended = ReadTotals(), AnswerLengths()
    for index in range(10):
        row = prepared_row(index, [1] * 10, max_tokens=10)
        read.add(row)
        ended.add(row, 5, is_cut=False)
    read.add(prepared_row(10, [1] * 1000, max_tokens=1000))
    left = forecast(read, ended, [], num_running=0, slots=4, share_read=1.0)
    assert left is not None
    assert left.work == pytest.approx(100 + 500)
    left = forecast(read, ended, [RunningSample(400, 1000)], num_running=1, slots=4, share_read=1.0)
    assert left is not None
    assert left.work >= 100  # not nearly done, whatever the short rows came to


def test_nothing_is_said_before_anything_is_known() -> None:
    read = ReadTotals()
    read.add(prepared_row(0, [1] * 10, max_tokens=10))
    assert forecast(read, AnswerLengths(), [], num_running=0, slots=4, share_read=1.0) is None
    status = RunStatus(state="running", pid=1, started_at="", updated_at="")
    assert "left" not in rates_text(status)


def test_equal_rows_are_no_work() -> None:
    read, ended = ReadTotals(), AnswerLengths()
    for index in range(100):
        row = prepared_row(index, [1] * 10, max_tokens=10)
        read.add(row)
        if index < 10:
            ended.add(row, 10, is_cut=True)
        elif index < 20:
            ended.drop(row, 1)
    left = forecast(read, ended, [], num_running=0, slots=4, share_read=1.0, computed_share=0.5)
    assert left is not None
    assert left.work == pytest.approx(40 * (10 + 1))


def test_bins() -> None:
    for length in (*range(1, 200), 1000, 4095, 4096, 131_072):
        assert bin_middle(bin_of(length)) == pytest.approx(length, rel=0.04)
    assert sorted(map(bin_of, range(5000))) == list(map(bin_of, range(5000)))


@pytest.mark.parametrize("seed", range(3))
def test_any_state_of_a_run_has_a_forecast(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        read, ended = ReadTotals(), AnswerLengths()
        running = []
        for index in range(rng.choice([1, 2, 30, 300])):
            most = rng.choice([None, 1, 7, 100, 5000])
            row = prepared_row(index, [1] * rng.choice([1, 50]), max_tokens=most)
            read.add(row)
            fate = rng.random()
            length = rng.randint(0, row.max_tokens)
            if fate < 0.4:
                ended.add(row, length, is_cut=length == row.max_tokens)
            elif fate < 0.5:
                ended.drop(row, rng.choice([1, 2]))
            elif fate < 0.7:
                running.append(RunningSample(length, rng.choice([row.max_tokens, 9])))
        left = forecast(
            read,
            ended,
            running,
            num_running=len(running) * rng.choice([1, 3]),
            slots=rng.choice([1, 16.5, 3000]),
            share_read=rng.choice([1.0, 0.01]),
            computed_share=rng.choice([1.0, 0.0]),
            uncached_share=rng.choice([1.0, 0.0]),
        )
        assert left is None or (0 <= left.work < 1e9 and 0 <= left.longest <= max(1.0, left.work) * 3.01)
