"""Forecasts of how long answers will be follow from answers that have ended, and from those that have not."""

from __future__ import annotations

import random
import statistics

from nvcli.engine.length_forecast import LengthForecast
from nvcli.engine.state import Prompt, RequestState
from requests_factory import make_request


def make_state(number: int, max_tokens: int, *, can_stop: bool = True) -> RequestState:
    request = make_request(number, [1, 2, 3], max_tokens, stop_ids=[9] if can_stop else [])
    return RequestState(request, Prompt(request))


def end_after(forecast: LengthForecast, state: RequestState, length: int) -> None:
    state.generated.extend([5] * length)
    forecast.end(state)


def draws(forecast: LengthForecast, max_tokens: int, number: int = 200, *, passed: int = 0) -> list[int]:
    """What is forecast for so many requests that begin now and have `passed` tokens."""
    drawn = []
    for i in range(number):
        state = make_state(10_000 + i, max_tokens)
        forecast.begin(state)
        state.generated.extend([5] * passed)
        drawn.append(forecast.draw(state))
    return sorted(drawn)


def test_an_answer_that_nothing_can_end_has_all_its_tokens() -> None:
    forecast = LengthForecast()
    state = make_state(0, 77, can_stop=False)
    forecast.begin(state)
    assert forecast.draw(state) == 77
    forecast.end(state)


def test_before_anything_has_ended_answers_are_of_some_hundred_tokens() -> None:
    assert 350 < statistics.mean(draws(LengthForecast(), 40_000)) < 650
    assert set(draws(LengthForecast(), 10)) <= set(range(1, 11))
    assert statistics.mean(draws(LengthForecast(), 1000)) < 650


def test_draws_spread_as_the_answers_did() -> None:
    forecast, rng = LengthForecast(), random.Random(0)
    lengths = sorted(rng.randint(100, 300) for _ in range(400))
    for number, length in enumerate(lengths):
        state = make_state(number, 1000)
        forecast.begin(state)
        end_after(forecast, state, length)
    forecast.learn()
    drawn = draws(forecast, 1000)
    for share in (0.1, 0.5, 0.9):
        assert abs(drawn[int(share * len(drawn))] - lengths[int(share * len(lengths))]) < 12
    assert min(draws(forecast, 1000, passed=250)) > 250
    assert draws(forecast, 1000, 50, passed=299)[-1] <= 1000
    assert abs(statistics.mean(draws(forecast, 900)) - 0.9 * statistics.mean(lengths)) < 10, "fractions of max_tokens"
    assert statistics.mean(draws(forecast, 60)) > 40, "another order of magnitude"


def test_answers_that_still_run_count_as_longer() -> None:
    """Half of the answers have 10 tokens, the other half 400: the first to end are all short."""
    forecast = LengthForecast()
    states = [make_state(number, 1000) for number in range(200)]
    for state in states:
        forecast.begin(state)
    for state in states[::2]:
        end_after(forecast, state, 10)
    for state in states[1::2]:
        state.generated.extend([5] * 50)
    forecast.learn()
    drawn = draws(forecast, 1000)
    assert 0.45 < sum(length > 50 for length in drawn) / len(drawn) < 0.55
    for state in states[1::2]:
        end_after(forecast, state, 350)
    forecast.learn()
    assert {length for length in draws(forecast, 1000) if length > 10} == {400}


def test_a_request_keeps_its_place() -> None:
    """What is learned without news changes nothing, and one that was preempted is not counted twice."""
    forecast = LengthForecast()
    for number in range(100):
        state = make_state(number, 500)
        forecast.begin(state)
        end_after(forecast, state, 1 + 3 * number)
    state = make_state(200, 500)
    forecast.begin(state)
    forecast.learn()
    drawn = forecast.draw(state)
    forecast.begin(state)
    forecast.learn()
    assert forecast.draw(state) == drawn
