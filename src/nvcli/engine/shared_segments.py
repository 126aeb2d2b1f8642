"""SharedSegments: the segments of KV blocks that decoding requests share in all KV groups, and the changes sent to
ranks.

`segment_forest.py` keeps the segments of each group. Only blocks full of known tokens count, and ranks get only the
changes. Neither module knows tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from nvcli.core.messages import pack
from nvcli.engine.segment_forest import SegmentCosts, SegmentForest
from nvcli.engine.state import RequestState


class SharedSegments:
    """The segments of all KV groups that have keys, and their unsent changes."""

    def __init__(
        self,
        windows: dict[int, int | None],
        *,
        block_size: int,
        max_num_seqs: int,
        costs: SegmentCosts | None,
        token_bytes: Sequence[int] = (),
    ) -> None:
        """`windows`: the window of each KV group with keys, by number (None: full attention). `costs`: None if the
        ranks do not read segments; then there are none. `token_bytes`: bytes per token in each KV group, for
        `num_bytes_saved`."""
        self._block_size = block_size
        self._least_saved = 0 if costs is None else costs.least_saved_in_step
        self._forests = {
            group: SegmentForest(costs, window, block_size, max_num_seqs)
            for group, window in windows.items()
            if costs is not None
        }
        self._counted = {
            group: size for group, size in enumerate(token_bytes) if group in self._forests and windows[group] is None
        }
        self.num_bytes_saved = 0
        """Bytes of keys and values that steps did not read, because they read them once for several rows. Groups with
        windows are not counted, as their rows may see only part of a segment."""
        self._inside: set[int] = set()
        """The slots of the requests in the forests."""
        self._sent: dict[tuple[int, int], int | None] = {}
        """(KV group, slot) → segment number last sent."""
        self._sent_default: int | None = 0
        """The number last sent for all other slots; None if unknown."""

    def enter(self, state: RequestState) -> None:
        """Add a request whose prompt is computed by the scheduled steps, unless it was added before or ends with the
        token that they give."""
        assert state.slot is not None
        if state.slot in self._inside or not self._forests:
            return
        if state.max_len <= state.num_tokens + 1:
            for forest in self._forests.values():
                forest.changed_slots[state.slot] = 0  # the steps may give no token, and then it decodes
            return
        self._inside.add(state.slot)
        # The block filled by the last known token is the request's own: that token is always computed.
        num_full = min(state.num_tokens - 1, state.num_computed) // self._block_size
        for group, forest in self._forests.items():
            first = state.first_columns[group]
            forest.enter(state.slot, first, state.blocks[group][first:num_full])

    def leave(self, slot: int) -> None:
        """Remove the request in a slot, if it was added."""
        if slot in self._inside:
            self._inside.remove(slot)
            for forest in self._forests.values():
                forest.leave(slot)

    @property
    def num_saved(self) -> int:
        """The keys per layer that a step saves, over all groups: those of each active segment, for each row except the
        first."""
        return sum(forest.num_saved for forest in self._forests.values())

    def take_changes(self, num_decodes: int) -> dict[str, Any]:
        """Return the fields of the next `StepInput` about segments, with what has changed since the last one.
        `num_decodes`: the decode rows of the step."""
        segments: list[int] = []
        slots: list[int] = []
        for group, forest in self._forests.items():
            for number, place in forest.changed_segments.items():
                segments += (group, number, *place)
            for slot, number in forest.changed_slots.items():
                if self._sent.get((group, slot), self._sent_default) != number:
                    self._sent[group, slot] = number
                    slots += (group, slot, number)
            forest.changed_segments.clear()
            forest.changed_slots.clear()
        num_saved = self.num_saved
        is_used = num_decodes > 1 and num_saved > 0 and num_saved >= self._least_saved
        for group, size in self._counted.items() if is_used else ():
            saved = self._forests[group].num_saved * min(num_decodes, len(self._inside)) // len(self._inside)
            self.num_bytes_saved += saved * size
        return {"segments": pack(segments), "slot_segments": pack(slots), "shares_segments": is_used}

    def forget_sent(self) -> None:
        """Record that steps did not run, so that the ranks' state is unknown. No request may be in the forests."""
        assert not self._inside
        self._sent.clear()
        self._sent_default = None

    def check_integrity(self, states: Iterable[RequestState]) -> None:
        """Assert that the segments are those of the decoding requests, which are among `states`."""
        by_slot = {state.slot: state for state in states if state.slot in self._inside}
        assert by_slot.keys() == self._inside
        for group, forest in self._forests.items():
            tables = {slot: state.blocks[group] for slot, state in by_slot.items() if slot is not None}
            sent = {slot: self._sent.get((group, slot), self._sent_default) for slot in tables} | forest.changed_slots
            forest.check_integrity(tables, {slot: number or 0 for slot, number in sent.items()})
