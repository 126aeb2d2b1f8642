"""DecodeQueue: the running requests whose known tokens are computed, in the order in which they decode.

Each of them is *ready* for its next decode row, or *parked* until tokens come back. As long as the same requests are
ready from step to step, what a step says of its rows is not put together anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nvcli.engine.state import RequestState
from nvcli.messages import pack


class DecodeQueue:
    """A request may be in it once. Requests that were parked get in line behind the others."""

    def __init__(self) -> None:
        self._ready: list[RequestState] = []
        self._parked: dict[RequestState, None] = {}
        self._slots: bytes | None = None
        """Packed slots of all ready requests, unless other ones have become ready."""
        self._lens: bytes | None = None
        """Packed `num_computed` of all ready requests, likewise."""

    def __contains__(self, state: RequestState) -> bool:
        return state in self._parked or state in self._ready

    def __len__(self) -> int:
        return len(self._ready) + len(self._parked)

    def leading(self, num_requests: int) -> list[RequestState]:
        """The first ready requests, at most so many."""
        return self._ready[:num_requests]

    def add(self, state: RequestState) -> None:
        """All that is known of a running request has been scheduled."""
        if state.must_wait:
            self._parked[state] = None
        else:
            self._ready.append(state)
            self._slots = self._lens = None

    def remove(self, state: RequestState) -> None:
        if state in self._parked:
            del self._parked[state]
        else:
            self._ready.remove(state)
            self._slots = self._lens = None

    def park(self, state: RequestState) -> None:
        """A ready request is to wait until some of its tokens have come back."""
        self.remove(state)
        self._parked[state] = None

    def unpark(self, states: Sequence[RequestState]) -> None:
        """Tokens of these requests have come back: those that were parked, and wait for no more of them, are ready."""
        parked = self._parked
        if len(parked) < len(states):
            ready = [state for state in parked if not state.must_wait]
        else:
            ready = [state for state in states if state in parked and not state.must_wait]
        if ready:
            for state in ready:
                del parked[state]
            self._ready += ready
            self._slots = self._lens = None

    def advance(self, rows: Sequence[RequestState], width: int) -> tuple[bytes, bytes, list[RequestState]]:
        """The first ready requests, `rows`, are scheduled for `width` tokens each.

        Gives their packed slots, their packed lengths behind the step, and those of them that are parked by it.
        """
        if len(rows) < len(self._ready):
            self._slots = self._lens = None
        if self._slots is None:
            self._slots = pack([state.slot for state in rows])  # type: ignore[misc]
        for state in rows:
            state.num_computed += width
        if self._lens is None:
            self._lens = pack([state.num_computed for state in rows])
        else:
            self._lens = _add_to_each(self._lens, width)
        slots, lens = self._slots, self._lens
        waiting = [state for state in rows if state.num_computed >= state.parks_at]
        if waiting or len(rows) < len(self._ready):
            self._ready = self._ready[len(rows) :]
            if len(waiting) < len(rows):
                self._ready += [state for state in rows if state.num_computed < state.parks_at]
            self._parked.update(dict.fromkeys(waiting))
            self._slots = self._lens = None
        return slots, lens, waiting

    def bounds_changed(self) -> None:
        """Some requests have another `num_computed` than `advance` gave them."""
        self._lens = None

    def check_integrity(self, others: Iterable[RequestState], running: Iterable[RequestState]) -> None:
        """Assert that these requests and `others` are the running ones, each once, and that who waits has reason to."""
        members = [*others, *self._ready, *self._parked]
        assert len(members) == len(set(members))
        assert set(members) == set(running)
        for state in [*self._ready, *self._parked]:
            assert state.num_computed >= len(state.token_ids) - 1
        assert not any(state.must_wait for state in self._ready)
        assert all(state.num_pending for state in self._parked)
        assert self._slots in (None, pack([state.slot for state in self._ready]))  # type: ignore[misc]
        assert self._lens in (None, pack([state.num_computed for state in self._ready]))


def _add_to_each(packed: bytes, value: int) -> bytes:
    """Add `value` to each of some packed int32, none of which overflows: as one long sum."""
    total = int.from_bytes(packed, "little") + int.from_bytes(pack([value]) * (len(packed) // 4), "little")
    return total.to_bytes(len(packed), "little")
