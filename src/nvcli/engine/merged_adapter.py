"""MergedAdapter: which LoRA adapter the ranks have merged into their weights, and when they change it.

Requests of the merged adapter run as those of a model without adapters do, and no others run beside them: they are a
*group*. Groups follow each other in the order in which their requests wait. Where possible the tail of a group overlaps
with the beginning of the next: once many slots are free and no request of the group waits, no adapter is merged, and
requests of all adapters run together by their places on the device (`AdapterPlaces`), until all that run have the same
adapter, which is then merged. Steps run in order, so steps in flight still have the weights of before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import islice
from typing import Any

from nvcli.core.messages import NO_ADAPTER, pack
from nvcli.engine.adapter_places import REACH, AdapterPlaces
from nvcli.engine.state import RequestState

_TAIL_SHARE = 0.75
"""Share of the slots up to which the rest of a group runs beside the next one. Above it, a step with free slots loses
less than adapters by place cost."""
_LEAST_SHARE = 0.25
"""Share of the slots that a group at least fills, or has requests waiting, before its adapter is merged: a change takes
as long as several steps."""


class MergedAdapter:
    """The merged adapter of one replica."""

    def __init__(self, places: AdapterPlaces, *, num_slots: int, mergeable: Collection[int]) -> None:
        """`mergeable`: the adapters that may be merged."""
        self._places, self._num_slots, self._mergeable = places, num_slots, frozenset(mergeable)
        self._due: int | None = None
        """The adapter to merge in the next step; None: the one before stays."""
        self._moves: list[int] = []
        """(slot, place) of running requests whose places have changed since the last step, flattened."""

    def regroup(self, waiting: deque[RequestState], running: Collection[RequestState]) -> None:
        """Change the merged adapter if that is due, and the places of running requests with it."""
        if not self._mergeable:
            return
        merged = self._places.merged
        first = next((state for state in waiting if not state.finished), None)
        if merged != NO_ADAPTER:
            if first is not None and not self._continues(merged, waiting):
                self._end_group(merged, first.request.adapter, running)
        elif running:
            self._begin_group(waiting, running)
        elif first is not None and first.request.adapter in self._mergeable:
            adapter = first.request.adapter
            if self._places.is_merged_only(adapter) or self._has_many(adapter, 0, waiting):
                self._merge(adapter)

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

    def _continues(self, merged: int, waiting: deque[RequestState]) -> bool:
        """Whether requests of the merged adapter wait, and have not passed over others too often."""
        if self._places.must_wait(waiting[0]):
            return False
        return any(state.request.adapter == merged and not state.finished for state in islice(waiting, REACH))

    def _end_group(self, merged: int, following: int, running: Collection[RequestState]) -> None:
        places = self._places
        if not running:
            self._merge(following if following in self._mergeable else NO_ADAPTER)
            return
        may_overlap = not places.is_merged_only(merged) and not places.is_merged_only(following)
        if may_overlap and len(running) <= self._num_slots * _TAIL_SHARE:
            self._merge(NO_ADAPTER)
            for state in running:
                self._move(state, places.hold(merged))

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
        self._places.merged = self._due = adapter

    def _move(self, state: RequestState, place: int) -> None:
        assert state.slot is not None
        state.adapter_place = place
        self._moves += [state.slot, place]
