"""Admission: admits a waiting request if the KV cache can hold it and the running requests until they end.

Admitting every request for which there are blocks now would fill the cache later, so that requests are preempted and
recomputed. Admitting only what fits if every answer used all of its `max_tokens` leaves most of the cache empty. So the
blocks that running requests will hold at each later step are added up, from forecasts of where their answers end
(`LengthForecast`), and a request is admitted if the sum never exceeds the cache (after Past-Future, Gong et al., ASPLOS
2025).

The sum is kept as a table over time, by the stretch of steps in which each request is forecast to end. A request costs
one update on entry and one on exit, and reading the table costs a few additions per stretch. Steps that admit nothing
cost nothing, and neither do steps in which all requests fit with all of their `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from nvcli.engine.block_manager import BlockManager
from nvcli.engine.block_tables import BlockTables
from nvcli.engine.length_forecast import LengthForecast
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.state import RequestState

_STRETCH = 64
"""Steps in one entry of the table."""
_PATIENCE = 32
"""Steps after which a refused request is tried again, even if no request has ended."""
_LEARN_STEPS = 128
_SPARE_SHARE = 0.04
"""The share of blocks left free, because answers may be longer than forecast. A larger share means fewer preemptions
but fewer running requests, which costs more where few fit (`scripts/simulate_scheduling.py`)."""


@dataclass(slots=True)
class _Stretch:
    """Requests forecast to end within one stretch of steps."""

    states: dict[RequestState, int] = field(default_factory=dict)
    """Each request's offset: the tokens that it alone holds at a step, minus that step's number. It is constant,
    because a request gets one token in each step."""
    offset: int = 0
    """The sum of the offsets."""


class Admission:
    """The running requests of one home, by their forecast ends. The caller counts the steps."""

    def __init__(self, limits: SchedulerLimits, forecast: LengthForecast | None = None) -> None:
        """`forecast`: that of all homes; None: there is no other home."""
        # A window as long as any request never gives a block back.
        growing = (
            group for group in limits.kv_groups if (group.window or limits.max_model_len) >= limits.max_model_len
        )
        num_growing = sum(1 / group.span for group in growing)
        self._blocks_per_token = num_growing / limits.block_size
        self._is_on = limits.plans_admission and num_growing > 0
        self.num_running = 0
        self._forecast = forecast or LengthForecast()
        self._stretches: dict[int, _Stretch] = {}
        """Number → stretch; stretch n covers the steps from n × _STRETCH on."""
        self._stretch_of: dict[RequestState, int] = {}
        self._offset = 0
        """The sum of all offsets."""
        self._last_step_sum = 0
        """The sum of the last step of each running request, if it uses all of its `max_tokens`."""
        self._last_steps: dict[RequestState, int] = {}
        self._learned_at = 0
        self._refused: RequestState | None = None
        """The request that was refused last; None once it may fit."""
        self._refused_at = 0

    def enter(self, state: RequestState, tables: BlockTables, budget: int, step: int) -> int | None:
        """Take the first blocks of a waiting request if it fits into the cache until it ends.

        Returns the number of tokens of its first chunk, at most `budget`. Returns None if the request has to wait,
        without blocks or with those that it had kept.
        """
        if state is self._refused and step - self._refused_at < _PATIENCE:
            return None
        manager = tables.block_manager
        num_free, keeps_blocks = manager.num_free, bool(state.blocks)
        # Every running request keeps room for one more row, so that admission does not cause preemption.
        reserve = tables.reserve(self.num_running)
        length = tables.enter(state, budget, reserve=reserve)
        if length == 0:  # an image that must not be cut waits for another step
            tables.release(state)
        if not length:
            return None
        if self._is_on:
            own = round((num_free - manager.num_free) / self._blocks_per_token)
            if self._stretch_of and not self._fits(state, own, step, manager):
                if not keeps_blocks:
                    tables.release(state)
                self._refused, self._refused_at = state, step
                return None
            self._forecast.begin(state)
            self._place(state, own - step, step)
            last_step = self._last_steps[state] = step + state.max_len - state.num_tokens
            self._last_step_sum += last_step
        self.num_running += 1
        return length

    def leave(self, state: RequestState) -> None:
        """Remove a running request, which has ended or was preempted."""
        self.num_running -= 1
        if not self._is_on:
            return
        self._remove(state)
        self._last_step_sum -= self._last_steps.pop(state)
        self._refused = None

    def end(self, state: RequestState) -> None:
        """Record that a request has ended, and the length of its answer."""
        self._forecast.end(state)

    def _fits(self, state: RequestState, own: int, step: int, manager: BlockManager) -> bool:
        """Whether the cache can hold a request that has its blocks (`own` of its tokens were held by no one before),
        along with the running ones, until they have ended."""
        room = (manager.num_free - _SPARE_SHARE * manager.num_blocks) / self._blocks_per_token
        if self._last_step_sum - len(self._last_steps) * step + state.max_len - state.num_tokens <= room:
            return True
        self._renew(step)
        return self._peak_growth(state, own, step) <= room

    def _place(self, state: RequestState, offset: int, step: int) -> None:
        number = self._stretch_number(state, step)
        stretch = self._stretches.setdefault(number, _Stretch())
        stretch.states[state] = offset
        stretch.offset += offset
        self._stretch_of[state] = number
        self._offset += offset

    def _remove(self, state: RequestState) -> int:
        number = self._stretch_of.pop(state)
        stretch = self._stretches[number]
        offset = stretch.states.pop(state)
        stretch.offset -= offset
        self._offset -= offset
        if not stretch.states:
            del self._stretches[number]
        return offset

    def _renew(self, step: int) -> None:
        """Redraw forecasts that an answer has outlived, and all of them once there is more data."""
        if self._forecast.has_news or step - self._learned_at >= _LEARN_STEPS:
            self._learned_at = step
            self._forecast.learn()
            outlived = list(self._stretch_of)
        else:
            past = [number for number in self._stretches if number < step // _STRETCH]
            outlived = [state for number in past for state in self._stretches[number].states]
        for state in outlived:
            self._place(state, self._remove(state), step)

    def _peak_growth(self, new: RequestState, own: int, step: int) -> int:
        """Return the peak growth of the cache, in tokens, if a request that alone holds `own` tokens joins."""
        number = self._stretch_number(new, step)
        held = self._offset + len(self._stretch_of) * step + own
        peak = offset = num_running = 0
        for at in sorted({*self._stretches, number}, reverse=True):
            stretch = self._stretches.get(at, _Stretch())
            num_running += len(stretch.states)
            offset += stretch.offset
            if at == number:
                num_running += 1
                offset += own - step
            peak = max(peak, offset + num_running * (at + 1) * _STRETCH - held)
        return peak

    def _stretch_number(self, state: RequestState, step: int) -> int:
        return (step + self._forecast.draw(state) - len(state.generated)) // _STRETCH

    def check_integrity(self, running: Collection[RequestState]) -> None:
        """Assert that the running requests are recorded, each in one stretch, and that the sums are right."""
        assert self.num_running == len(running)
        assert set(self._stretch_of) == set(self._last_steps) == (set(running) if self._is_on else set())
        assert sum(self._last_steps.values()) == self._last_step_sum
        assert sum(stretch.offset for stretch in self._stretches.values()) == self._offset
        placed = {state: number for number, stretch in self._stretches.items() for state in stretch.states}
        assert placed == self._stretch_of
        for stretch in self._stretches.values():
            assert stretch.states
            assert sum(stretch.states.values()) == stretch.offset
