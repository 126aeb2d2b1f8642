"""DecodeQueue: the running requests whose known tokens are computed, in decoding order.

Each of them is *ready* for its next decode row, or *parked* until tokens come back. While the same requests stay ready
from step to step, their packed slots and lengths are updated, not repacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nvcli.core.messages import pack
from nvcli.engine.state import RequestState


class DecodeQueue:
    """A queue that holds each request at most once. A parked request rejoins at the end of the ready ones."""

    def __init__(self) -> None:
        self._ready: list[RequestState] = []
        self._parked: dict[RequestState, None] = {}
        self._slots: bytes | None = None
        """The packed slots of all ready requests; None once the ready requests have changed."""
        self._lens: bytes | None = None
        """The packed `num_computed` of all ready requests; None once the requests or their lengths have changed."""

    def __contains__(self, state: RequestState) -> bool:
        return state in self._parked or state in self._ready

    def __len__(self) -> int:
        return len(self._ready) + len(self._parked)

    def leading(self, num_requests: int) -> list[RequestState]:
        """Return the first ready requests, up to `num_requests` of them."""
        return self._ready[:num_requests]

    def add(self, state: RequestState) -> None:
        """Add a running request whose known tokens have all been scheduled."""
        if state.must_wait:
            self._parked[state] = None
        else:
            self._ready.append(state)
            self._slots = self._lens = None

    def remove(self, state: RequestState) -> None:
        """Remove a request from the queue."""
        if state in self._parked:
            del self._parked[state]
        else:
            self._ready.remove(state)
            self._slots = self._lens = None

    def unpark(self, states: Sequence[RequestState]) -> None:
        """Make those of these requests ready that were parked and need not wait for more tokens; their tokens have come
        back."""
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

    def advance(self, rows: Sequence[RequestState], widths: Sequence[int]) -> tuple[bytes, bytes, list[RequestState]]:
        """Schedule the next tokens of each of `rows`, which are the first ready requests.

        Returns their packed slots, their packed lengths after the step, and the requests that are parked by it.
        """
        if len(rows) < len(self._ready):
            self._slots = self._lens = None
        if self._slots is None:
            self._slots = pack([state.slot for state in rows])  # type: ignore[misc]
        for state, width in zip(rows, widths, strict=True):
            state.num_computed += width
        most = max(widths, default=0)
        if self._lens is None or most > min(widths, default=0):
            self._lens = pack([state.num_computed for state in rows])
        else:
            self._lens = _add_to_each(self._lens, most)
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
        """Forget the packed lengths, because some requests no longer have the `num_computed` that `advance` set."""
        self._lens = None

    def check_integrity(self, others: Iterable[RequestState], running: Iterable[RequestState]) -> None:
        """Assert that the requests here and `others` are the running ones, each once, and that parked ones wait."""
        members = [*others, *self._ready, *self._parked]
        assert len(members) == len(set(members))
        assert set(members) == set(running)
        for state in [*self._ready, *self._parked]:
            assert state.num_computed >= state.num_tokens - 1
        assert not any(state.must_wait for state in self._ready)
        assert all(state.num_pending for state in self._parked)
        assert self._slots in (None, pack([state.slot for state in self._ready]))  # type: ignore[misc]
        assert self._lens in (None, pack([state.num_computed for state in self._ready]))


def _add_to_each(packed: bytes, value: int) -> bytes:
    """Add `value` to each of some packed int32 numbers, with a single addition of long integers; none may overflow."""
    total = int.from_bytes(packed, "little") + int.from_bytes(pack([value]) * (len(packed) // 4), "little")
    return total.to_bytes(len(packed), "little")
