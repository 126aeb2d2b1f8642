"""The time left and the percentage hold where rows differ in length: short answers end first and say little of others.

The estimate is judged in runs on a simulated machine; `scripts/bench_time_left.py` prints the same figures.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from bench_time_left import MACHINES, Kinds, judge, run_simulated
from nvcli.job.progress.display import rates_text
from nvcli.job.progress.forecast import RunningSample, forecast
from nvcli.job.progress.run_status import RunStatus
from nvcli.job.progress.speed import USUAL_OF_GPU, Speed, Work
from nvcli.job.progress.survival import Belief, Known
from nvcli.job.run.counts import AnswerLengths, ReadTotals, bin_middle, bin_of
from prepared_rows import prepared_row
from simulated_run import FakeRow, Machine, simulate

KINDS = [name for name in vars(Kinds) if not name.startswith("_")]
UNKNOWABLE = {"short_first", "long_first", "two_groups", "one_wave"}
"""Kinds of which nothing tells how long later answers become, before they have come so far."""


def test_the_estimate_holds_in_all_kinds_of_jobs() -> None:
    figures = {kind: judge(run_simulated(kind, MACHINES["cpu"], slots=96, looks=20, seed=7)) for kind in KINDS}
    for kind, each in figures.items():
        assert not each["back"], kind
        if kind not in UNKNOWABLE:
            assert each["error"] < 0.5, kind
            assert each["twice"] > 0.65, kind
            assert each["range"] > 0.65, kind
            assert each["bar"] < 0.2, kind
    medians = {name: statistics.median(each[name] for each in figures.values()) for name in ("error", "third", "twice")}
    assert medians["error"] < 0.2
    assert medians["third"] > 0.8
    assert medians["twice"] > 0.9


def test_the_estimate_holds_on_a_machine_whose_steps_take_long_with_few_samples() -> None:
    kinds = [kind for kind in KINDS if kind not in UNKNOWABLE][::3]
    assert (
        statistics.median(
            judge(run_simulated(kind, MACHINES["gpu"], slots=64, looks=40, seed=8))["error"] for kind in kinds
        )
        < 1 / 3
    )


def test_rows_that_are_not_read_yet_are_like_those_that_were() -> None:
    rng = random.Random(7)
    rows = [FakeRow(rng.randint(1, 400), max_tokens=512) for _ in range(1500)]
    looks = simulate(rows, MACHINES["cpu"], slots=64, rows_ahead=300, look_seconds=2)
    assert judge(looks)["third"] > 0.9


def test_the_time_left_of_a_job_that_is_continued() -> None:
    rng = random.Random(7)
    rows = [FakeRow(rng.randint(1, 400), max_tokens=512) for _ in range(1500)]
    looks = simulate(rows, MACHINES["cpu"], slots=64, rows_ahead=300, look_seconds=2, rows_resumed=900)
    assert judge(looks)["third"] > 0.9


def test_the_bar_moves_while_no_row_is_done() -> None:
    looks = simulate([FakeRow(1000, max_tokens=1000)] * 60, MACHINES["cpu"], slots=64, look_seconds=2)
    shares = [look.status.share_done or 0.0 for look in looks if not look.status.rows.done]
    assert len(shares) > 10
    assert all(after > before for before, after in pairwise(shares))
    assert shares[-1] > 0.8


def test_before_anything_has_ended_answers_are_shorter_than_half_of_what_is_allowed() -> None:
    one = known({}, {})
    short, middle, long = (each.length(0.5, age=0, most=2000) for each in Belief([one], is_asked=True).outlooks(one))
    assert 100 < middle < 1000
    assert short < middle / 1.5
    assert long > middle * 1.5
    # As they come, they may have to become longer.
    one = known({}, {800: 100.0})
    middle = Belief([one], is_asked=True).outlooks(one).middle.length(0.5, age=800, most=2000)
    assert 900 < middle <= 2000


def test_a_range_is_shown_while_little_is_known() -> None:
    # One wave: nothing ends before all do. Nobody can know, and the estimate must not pretend to.
    looks = simulate([FakeRow(400, max_tokens=2000)] * 60, MACHINES["cpu"], slots=64)
    early = [look for look in looks if 0.1 < look.done < 0.5]
    assert len(early) >= 5
    for look in early:
        low, high = look.status.eta_low_seconds, look.status.eta_high_seconds
        assert low is not None
        assert high is not None
        assert low <= look.left <= high
        assert " to " in rates_text(look.status)
    # Several waves: once the first ones have ended, the length is known.
    looks = simulate([FakeRow(300, max_tokens=2000)] * 600, MACHINES["cpu"], slots=64)
    assert " to " not in rates_text(looks[len(looks) // 2].status)


def known(stopped: dict[int, int], running: dict[int, float], *, cut: dict[int, int] | None = None) -> Known:
    def bins(counts: Mapping[int, Any]) -> dict[int, Any]:
        return {bin_of(length): count for length, count in counts.items()}

    return Known(most=2000.0, prompt=20.0, stopped=bins(stopped), cut=bins(cut or {}), running=bins(running))


def test_answers_that_run_count_towards_the_length() -> None:
    # Of 100 samples 50 ended at 10, and 50 run at 1,000.
    one = known({10: 50}, {1000: 50.0})
    survival = Belief([one], is_asked=True).outlooks(one).middle
    assert survival.length(0.4, age=0, most=2000) == pytest.approx(10, abs=2)
    assert survival.length(0.6, age=0, most=2000) > 1000
    assert survival.length(0.6, age=0, most=1200) == 1200
    # All that may have 100 tokens come to them.
    one = known({}, {20: 10.0}, cut={100: 50})._replace(most=100.0)
    survival = Belief([one], is_asked=True).outlooks(one).middle
    assert survival.length(0.2, age=20, most=100) == pytest.approx(100, abs=3)


def test_long_prompts_have_long_answers_where_they_had_them() -> None:
    classes = [
        known({length: 30}, {})._replace(prompt=float(length)) if length < 400 else known({}, {})._replace(prompt=800.0)
        for length in (50, 100, 200, 800)
    ]
    survival = Belief(classes, is_asked=True).outlooks(classes[-1]).middle
    assert survival.length(0.5, age=0, most=2000) == pytest.approx(800, rel=0.3)


def test_rows_that_ask_for_more_than_those_before_come_to_the_same_share() -> None:
    read, ended = ReadTotals(), AnswerLengths()
    for index in range(10):
        row = prepared_row(index, [1] * 10, max_tokens=10)
        read.add(row)
        ended.add(row, 5, is_cut=False)
    read.add(prepared_row(10, [1] * 1000, max_tokens=1000))
    left = forecast(read, ended, [], num_running=0, slots=4, share_read=1.0)
    assert left is not None
    assert left.middle.tokens == pytest.approx(500, rel=0.15)


def test_nothing_is_said_before_anything_is_known() -> None:
    assert forecast(ReadTotals(), AnswerLengths(), [], num_running=0, slots=4, share_read=1.0) is None
    assert Speed(USUAL_OF_GPU).seconds(Work(tokens=1)) is None
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
    left = forecast(read, ended, [], num_running=0, slots=4, share_read=1.0, prompt_tokens=100, computed_share=0.5)
    assert left is not None
    assert left.middle.tokens == pytest.approx(40 * 10, rel=0.1)
    assert left.middle.prompt_tokens == pytest.approx(40 * 10)


def test_prices_are_learned_from_the_work_that_was_done() -> None:
    machine = Machine(fixed=0.02, each=1e-4, key=2e-7, prompt=1e-4)
    speed = Speed(USUAL_OF_GPU)
    rng = random.Random(0)
    for _ in range(200):
        running, context, prompts = rng.randint(10, 100), rng.randint(100, 2000), rng.randint(0, 2000)
        seconds = machine.seconds(20, running, running * context) + machine.prompt * prompts
        work = Work(20, 20 * running, 20 * running * (context + 9.5), prompts)
        speed.learn(work, seconds, num_running=running)
    for running in (1, 100):
        work = Work(1000, 1000 * running, 1000 * running * 1000)
        truth = machine.seconds(1000, running, running * 500.5)
        assert speed.seconds(work) == pytest.approx(truth, rel=0.25)


def test_bins() -> None:
    for length in (*range(1, 200), 1000, 4095, 4096, 131_072):
        assert bin_middle(bin_of(length)) == pytest.approx(length, rel=0.04)
    assert sorted(map(bin_of, range(5000))) == list(map(bin_of, range(5000)))


@pytest.mark.parametrize("seed", range(3))
def test_any_state_of_a_run_has_a_forecast(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
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
                running.append(RunningSample(length, rng.choice([row.max_tokens, 9]), row.num_prompt_tokens))
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
        assert left is not None
        for work in left:
            assert all(0 <= amount < 1e12 for amount in work)
            assert work.steps <= max(1.0, work.tokens) * 3.01
