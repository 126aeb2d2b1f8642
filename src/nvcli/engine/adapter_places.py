"""AdapterPlaces: which LoRA adapters are on the device, and where.

The ranks have a limited number of *places*, each of which holds one adapter for any number of requests. A request holds
its adapter's place from when it enters until it leaves. An adapter that no request holds stays until another one needs
its place; the least recently held goes first. Steps run in order, so a place may be reassigned while steps that use its
previous adapter are in flight.

While an adapter is merged into the weights (`MergedAdapter`), its requests hold no place, and no others may enter.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from itertools import islice

from nvcli.core.messages import NO_ADAPTER, pack
from nvcli.engine.state import RequestState

REACH = 512
"""Maximum waiting requests that are searched for one that may overtake."""
_MOST_PASSING = 2048
"""Maximum times that a request waiting for a place may be overtaken."""


class AdapterPlaces:
    """The places of one replica, numbered from 1, and the adapters in them."""

    def __init__(self, num_places: int, *, merged_only: Collection[int] = ()) -> None:
        """`merged_only`: adapters that can have no place."""
        self._num_places = num_places
        self._merged_only = frozenset(merged_only)
        self.merged = NO_ADAPTER
        """The adapter that is merged into the weights; NO_ADAPTER: none."""
        self.awaited = NO_ADAPTER
        """The adapter to be merged next: its requests wait for that, and no others overtake them."""
        self._free = list(range(num_places, 0, -1))
        """Places without an adapter; the end is taken first."""
        self._places: dict[int, int] = {}
        """Adapter → its place."""
        self._num_holders: dict[int, int] = {}
        """Adapter → the running requests that hold it, at least one."""
        self._unheld: OrderedDict[int, None] = OrderedDict()
        """Adapters in places that no request holds, the least recently held first."""
        self._passed: RequestState | None = None
        """The waiting request that others have overtaken."""
        self._num_passing = 0
        """The number of requests that have overtaken it."""
        self._loads: list[int] = []
        """(place, adapter) of each load since the last step, flattened."""

    @property
    def has_holders(self) -> bool:
        """Whether any running request has an adapter."""
        return bool(self._num_holders)

    def has_room_for(self, adapter: int) -> bool:
        """Whether `hold` can be called for an adapter."""
        if self.merged != NO_ADAPTER:
            return adapter == self.merged
        if adapter == NO_ADAPTER or adapter in self._places:
            return True
        return adapter not in self._merged_only and bool(self._free or self._unheld)

    def is_merged_only(self, adapter: int) -> bool:
        """Whether an adapter can have no place."""
        return adapter in self._merged_only

    def must_wait(self, first: RequestState) -> bool:
        """Whether the first waiting request has been overtaken so often that none may enter before it."""
        return first is self._passed and self._num_passing >= _MOST_PASSING

    def bring_forward(self, waiting: deque[RequestState]) -> bool:
        """Move the first waiting request whose adapter has a place, or can get one, to the front of the queue, past
        others that wait for a place; return whether there is one. So rows whose adapters are on the device go first,
        and none waits forever."""
        first = waiting[0]
        if first.request.adapter == self.awaited != NO_ADAPTER:
            return False
        if self.has_room_for(first.request.adapter):
            if first is self._passed:
                self._passed = None
            return True
        if first is not self._passed:
            self._passed, self._num_passing = first, 0
        if self.must_wait(first):
            return False
        for number, state in enumerate(islice(waiting, REACH)):
            if self.has_room_for(state.request.adapter):
                del waiting[number]
                waiting.appendleft(state)
                self._num_passing += 1
                return True
        return False

    def hold(self, adapter: int) -> int:
        """Return the place of an entering request's adapter, and have it loaded if it is not on the device; NO_ADAPTER
        if it needs none."""
        if adapter in (NO_ADAPTER, self.merged):
            return NO_ADAPTER
        place = self._places.get(adapter)
        if place is None:
            place = self._free.pop() if self._free else self._places.pop(self._unheld.popitem(last=False)[0])
            self._places[adapter] = place
            self._loads += [place, adapter]
        self._unheld.pop(adapter, None)
        self._num_holders[adapter] = self._num_holders.get(adapter, 0) + 1
        return place

    def release(self, adapter: int, place: int) -> None:
        """Record that a request has left, or needs no place any more. `place`: what `hold` returned."""
        if place == NO_ADAPTER:
            return
        self._num_holders[adapter] -= 1
        if not self._num_holders[adapter]:
            del self._num_holders[adapter]
            self._unheld[adapter] = None

    def take_loads(self) -> bytes:
        """Return `StepInput.adapter_loads` since the last call."""
        loads, self._loads = self._loads, []
        return pack(loads)

    def forget(self) -> None:
        """Treat all places as empty, because steps that would have loaded adapters did not run. No request may hold
        one."""
        assert not self._num_holders
        self._free = list(range(self._num_places, 0, -1))
        self._places.clear()
        self._unheld.clear()
        self._loads.clear()

    def check_integrity(self, running: list[tuple[int, int]]) -> None:
        """Assert that places and counts agree with the (adapter, place) of each running request that has one."""
        counts: dict[int, int] = {}
        for adapter, place in running:
            assert self._places[adapter] == place, "an adapter is not where a running request reads it"
            counts[adapter] = counts.get(adapter, 0) + 1
        assert counts == self._num_holders
        assert set(self._places) == counts.keys() | self._unheld.keys()
        assert not counts.keys() & self._unheld.keys()
        assert sorted([*self._free, *self._places.values()]) == list(range(1, self._num_places + 1))
