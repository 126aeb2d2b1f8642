"""MergedAdapter: which LoRA adapter the ranks have merged into their weights, and when they change it.

Requests of the merged adapter run as those of a model without adapters do, and no others run beside them: they are a
*group*. Groups follow each other in the order in which their requests wait. A group ends with a *tail*: no request of
it waits, and slots become free. If the next group would fill all slots, the tail rests: its requests keep their blocks
and give their slots to that group. Once many rest, or no such group follows, no adapter is merged, and the tails go on
together, each request with its adapter's place on the device (`AdapterPlaces`). So do smaller groups, until all that
run have the same adapter, which is then merged. Steps run in order, so steps in flight still use the previous weights.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from itertools import islice
from typing import Any

from nvcli.core.messages import NO_ADAPTER, pack
from nvcli.engine.adapter_places import REACH, AdapterPlaces
from nvcli.engine.state import RequestState

_TAIL_SHARE = 0.75
"""Share of the slots up to which requests are a tail. Above it, a step with free slots loses less than adapters by
place cost."""
_LEAST_SHARE = 0.25
"""Share of the slots that a group at least fills, or has requests waiting, before its adapter is merged: a change takes
as long as several steps."""
_MOST_REST = 4096
"""Steps with resting requests after which the group that has the slots admits no more, and the resting ones go on: a
group may be long, and a program's requests may never end."""


class MergedAdapter:
    """The merged adapter of one replica."""

    def __init__(self, places: AdapterPlaces, *, num_slots: int, mergeable: Collection[int]) -> None:
        """`mergeable`: the adapters that may be merged."""
        self._places, self._num_slots, self._mergeable = places, num_slots, frozenset(mergeable)
        self._resting: deque[RequestState] = deque()
        """Requests of tails that rest, in the order in which they did so."""
        self._num_steps = 0
        """Steps in which some rested, since an adapter was merged while none did."""
        self._due: int | None = None
        """The adapter to merge in the next step; None: the one before stays."""
        self._moves: list[int] = []
        """(slot, place) of running requests whose places have changed since the last step, flattened."""

    @property
    def num_resting(self) -> int:
        return len(self._resting)

    def regroup(
        self, waiting: deque[RequestState], running: Collection[RequestState], *, may_rest: bool
    ) -> list[RequestState]:
        """Change the merged adapter if that is due, and the places of running requests with it.

        Returns the running requests that are to rest: they leave their slots before the next step, and wait here until
        they are put before the `waiting` ones. `may_rest`: whether there is memory for the blocks of both groups.
        """
        if not self._mergeable:
            return []
        places, merged = self._places, self._places.merged
        first = next((state for state in waiting if not state.finished), None)
        following = NO_ADAPTER if first is None else first.request.adapter
        is_tail = 0 < len(running) <= self._num_slots * _TAIL_SHARE
        self._num_steps += bool(self._resting)
        is_overdue = self._num_steps > _MOST_REST
        may_rest &= not is_overdue
        places.awaited = merged if is_overdue else NO_ADAPTER
        if merged != NO_ADAPTER:
            if not is_overdue and self._goes_on(merged, first, waiting):
                return []
            if not running:
                comes_next = following in self._mergeable and (
                    not self._resting or (not is_overdue and following == self._full_group(waiting))
                )
                self._follow(following if comes_next else NO_ADAPTER, waiting)
            elif is_tail and not places.is_merged_only(merged):
                has_room = may_rest and len(self._resting) + len(running) <= self._num_slots
                if has_room and following == self._full_group(waiting) != NO_ADAPTER:
                    return self._rest(running)
                if not places.is_merged_only(following):
                    self._follow(NO_ADAPTER, waiting)
                    for state in running:
                        self._move(state, places.hold(merged))
        elif running:
            if may_rest:
                places.awaited = self._full_group(waiting)
                if is_tail and following == places.awaited != NO_ADAPTER:
                    return self._rest(running)
            if first is None or not first.generated:  # one that has begun goes on before any group
                self._begin_group(waiting, running)
        elif following in self._mergeable and (
            places.is_merged_only(following) or self._has_many(following, 0, waiting)
        ):
            self._merge(following)
        elif self._resting:
            self._follow(NO_ADAPTER, waiting)
        return []

    def take_changes(self) -> dict[str, Any]:
        """Return the fields of a `StepInput` about adapters, with what has changed since the last call."""
        due, self._due = self._due, None
        moves, self._moves = self._moves, []
        return {
            "adapter_loads": self._places.take_loads(),
            "has_adapters": self._places.has_holders,
            "merged_adapter": due,
            "adapter_moves": pack(moves),
        }

    def forget(self) -> None:
        """Merge again, because steps that would have done it did not run. No request may be running."""
        self._moves.clear()
        if self._mergeable:
            self._due = self._places.merged

    def lower_limits(self, num_slots: int) -> None:
        """Go on with fewer slots."""
        self._num_slots = num_slots

    def _goes_on(self, merged: int, first: RequestState | None, waiting: deque[RequestState]) -> bool:
        """Whether requests of the merged adapter wait, and have not passed over others too often, or there are no
        others."""
        if first is None:
            return not self._resting
        if self._places.must_wait(waiting[0]):
            return False
        return any(state.request.adapter == merged and not state.finished for state in islice(waiting, REACH))

    def _rest(self, running: Collection[RequestState]) -> list[RequestState]:
        tail = list(running)
        self._resting += tail
        return tail

    def _follow(self, adapter: int, waiting: deque[RequestState]) -> None:
        """Merge another adapter, or none, so that those that rest are next."""
        self._merge(adapter)
        if adapter == NO_ADAPTER:
            waiting.extendleft(reversed(self._resting))
            self._resting.clear()

    def _full_group(self, waiting: deque[RequestState]) -> int:
        """Return the first adapter that may be merged and whose waiting requests would take all slots; NO_ADAPTER:
        none."""
        num_waiting = Counter(state.request.adapter for state in islice(waiting, REACH))
        full = (n for n, count in num_waiting.items() if count >= min(self._num_slots, REACH) and n in self._mergeable)
        return next(full, NO_ADAPTER)

    def _begin_group(self, waiting: deque[RequestState], running: Collection[RequestState]) -> None:
        adapter = next(iter(running)).request.adapter
        if adapter not in self._mergeable or any(state.request.adapter != adapter for state in running):
            return
        if self._has_many(adapter, len(running), waiting):
            for state in running:
                self._places.release(adapter, state.adapter_place)
                self._move(state, NO_ADAPTER)
            self._merge(adapter)

    def _has_many(self, adapter: int, num_running: int, waiting: deque[RequestState]) -> bool:
        least = self._num_slots * _LEAST_SHARE
        if num_running >= least:
            return True
        num_waiting = sum(state.request.adapter == adapter for state in islice(waiting, REACH))
        return num_running + num_waiting >= least

    def _merge(self, adapter: int) -> None:
        if adapter != NO_ADAPTER and not self._resting:
            self._num_steps = 0
        self._places.merged = self._due = adapter

    def _move(self, state: RequestState, place: int) -> None:
        assert state.slot is not None
        state.adapter_place = place
        self._moves += [state.slot, place]
