"""LengthForecast: predicts the lengths of answers from the answers of the run so far.

Answers are compared by the fraction of `max_tokens` that they use, among requests whose `max_tokens` has the same order
of magnitude. The forecast learns from the requests admitted last: ended ones count by their length, running ones by the
length they have already passed (the product-limit estimate of Kaplan and Meier, 1958). Without the running ones, the
first answers to end, which are the short ones, would stand for all. Beyond the data, and before anything has ended,
each token is equally likely to end an answer.

A forecast is a draw from this distribution and not its mean, so that the right share of requests ends early and the
right share late. A request keeps its place in the distribution, so a new draw moves it only by what was learned. A
request that nothing can end before `max_tokens` has that length.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass

from nvcli.engine.state import RequestState

_COHORT = 1024
"""The number of most recently admitted requests that a class considers."""
_FIRST_GUESS = 512
"""The mean length of an answer, in tokens, before any has ended."""
_GUESSED_ANSWERS = 4
"""The number of answers that the first guess counts for."""
_LEAST_NEWS = 8
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
"""Multiples of it, modulo 1, are spread evenly over 0 to 1 however many there are."""


@dataclass(slots=True)
class _Answer:
    """A request of a class, running or ended."""

    state: RequestState | None
    """None once it has ended."""
    place: float
    """The place in the distribution: 0 is the longest answer, 1 the shortest."""
    length: float = 0.0
    """The fraction of `max_tokens` that it used, once it has ended."""


class _LengthClass:
    """The requests whose `max_tokens` has the same number of binary digits, and their distribution as last
    estimated."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: that of any request of the class."""
        self._first_guess = _FIRST_GUESS / max_tokens
        self.answers: deque[_Answer] = deque(maxlen=_COHORT)
        self.lengths: list[float] = []
        """Fractions at which answers have ended, ascending."""
        self.survival: list[float] = [1.0]
        """The share of answers longer than each of these; it starts with 1 for a length of 0."""
        self.longest = 0.0
        """The mean fraction passed by those that outlived all of these."""
        self.mean_rest = self._first_guess
        """The mean fraction by which answers continue from there."""

    def learn(self) -> None:
        """Estimate the distribution anew."""
        seen: list[tuple[float, bool]] = []
        for answer in self.answers:
            state = answer.state
            if state is None:
                seen.append((answer.length, True))
            else:
                seen.append((len(state.generated) / state.request.max_tokens, False))
        seen.sort()
        total = 0.0
        self.lengths, self.survival = [], [1.0]
        at_risk = len(seen)
        for length, has_ended in seen:
            total += length
            if has_ended:
                self.survival.append(self.survival[-1] * (1 - 1 / at_risk))
                self.lengths.append(length)
            at_risk -= 1
        last = self.lengths[-1] if self.lengths else 0.0
        survivors = [length for length, _ in seen if length > last]
        self.longest = sum(survivors) / len(survivors) if survivors else last
        num_ends = len(self.lengths) + _GUESSED_ANSWERS
        self.mean_rest = (total + _GUESSED_ANSWERS * self._first_guess) / num_ends

    def draw(self, place: float, passed: float) -> float:
        """Return the fraction at which an answer ends, given its `place` among those longer than `passed`."""
        at = bisect_right(self.lengths, passed)
        if at == len(self.lengths):
            return max(passed, self.longest) - self.mean_rest * math.log(place)
        wanted = place * self.survival[at]
        first = bisect_left(self.survival, -wanted, at + 1, key=operator.neg) - 1
        if first < len(self.lengths):  # the first length that so small a share outlives
            return self.lengths[first]
        return self.longest + self.mean_rest * math.log(self.survival[-1] / wanted)


class LengthForecast:
    """The answers of one replica's requests, by length class."""

    def __init__(self) -> None:
        self._classes: dict[int, _LengthClass] = {}
        self._running: dict[RequestState, _Answer] = {}
        self._num_begun = 0
        self._num_ended = 0
        self._learned_from = 0
        """The number of ended answers at the last `learn`."""

    def begin(self, state: RequestState) -> None:
        """Record a request that is admitted; a preempted one that comes back changes nothing."""
        if state in self._running or is_certain(state):
            return
        self._num_begun += 1
        answer = _Answer(state, 1 - self._num_begun * _GOLDEN_RATIO % 1)
        self._running[state] = answer
        self._class_of(state).answers.append(answer)

    def end(self, state: RequestState) -> None:
        """Record that an answer, or its request, has ended."""
        answer = self._running.pop(state, None)
        if answer is not None:
            self._num_ended += 1
            answer.state = None
            answer.length = len(state.generated) / state.request.max_tokens

    @property
    def has_news(self) -> bool:
        """Whether many more answers have ended since the last `learn`."""
        known = min(self._learned_from, _COHORT)
        return self._num_ended - self._learned_from >= max(_LEAST_NEWS, known // 8)

    def learn(self) -> None:
        """Update the distributions from all answers; draws use this state."""
        self._learned_from = self._num_ended
        for one in self._classes.values():
            one.learn()

    def draw(self, state: RequestState) -> int:
        """Return the forecast length of a request's answer in tokens: more than was generated, unless that is
        `max_tokens`."""
        most = state.request.max_tokens
        if is_certain(state):
            return most
        num_generated = len(state.generated)
        answer = self._running.get(state)
        place = 0.5 if answer is None else answer.place
        drawn = self._class_of(state).draw(place, num_generated / most)
        return min(most, max(num_generated + 1, round(drawn * most)))

    def _class_of(self, state: RequestState) -> _LengthClass:
        key = state.request.max_tokens.bit_length()
        one = self._classes.get(key)
        if one is None:
            one = self._classes[key] = _LengthClass(state.request.max_tokens)
        return one


def is_certain(state: RequestState) -> bool:
    """Whether an answer can end only at `max_tokens`."""
    request = state.request
    return not request.stop_ids and not request.stream and request.constraint is None and state.watch is None
