"""SharedSegments: which runs of KV blocks the decoding requests have in common, and which of them are worth being read
once for all.

In each KV group the blocks of decoding requests form a forest. A *segment* is a run of blocks that the same requests
hold; behind it they part. A request comes in when its prompt is computed and leaves with its slot, and each costs as
much as its blocks and its segments; nothing is done for a step. With a window a request may lack the blocks at the
beginning: its segments then begin in the middle of a tree.

A segment that pays is *active*: it has a number in the tables of the ranks, and so have all before it. Ranks are told
what changes, and no more (`SegmentChanges`). Only blocks full of known tokens count. This module knows no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from nvcli.engine.state import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCosts:
    """What decides whether segments are worth being read once for all, in keys of a layer that one row reads.

    Measured on an H200 with 8 KV heads of 128 in bf16. There a row reads 1,000 keys in 0.43 us where other rows read
    them too and they come from the L2 cache, as most do.
    """

    tile: float = 2.0
    """What reading a segment once for all takes, for each of its keys."""
    partial_result: int = 96
    """What a row's result for a segment takes to be written and read: 1,024 rows behind segments of 192 keys take 292
    us a layer with it and 333 us without."""
    least_gain: int = 512
    """A segment is active once it gains so many keys, and until it gains less than half of them."""
    least_saved_in_step: int = 16_384
    """A step reads active segments once for all where that saves so many keys. It launches one kernel more in each
    layer, which takes 3 us if it finds nothing to do, and plans for longer. 16 rows behind 2,048 keys (30,720 saved)
    take 25 us a layer against 33."""


@dataclass(slots=True, eq=False)
class _Segment:
    """A run of blocks, in columns [begin, begin + len(blocks)) of the block tables of the same requests."""

    begin: int
    blocks: list[int]
    parent: _Segment | None
    children: dict[_Segment, None] = field(default_factory=dict)
    slots: set[int] = field(default_factory=set)
    """The slots of the requests whose last segment it is."""
    num_rows: int = 0
    """The number of requests that hold its blocks."""
    number: int = 0
    """Its number in the tables of the ranks; 0: it is not active."""

    @property
    def end(self) -> int:
        return self.begin + len(self.blocks)


@dataclass(frozen=True, slots=True)
class SegmentChanges:
    """What a step tells the ranks of segments."""

    segments: list[tuple[int, int, int, int, int]]
    """(KV group, number, first key, end of the keys, number of the parent or 0) of segments that are new or changed."""
    slots: list[tuple[int, int, int]]
    """(KV group, slot, number of its last active segment or 0)."""
    is_used: bool
    """Whether the step is to read active segments once for all."""


class _Forest:
    """The segments of one KV group."""

    def __init__(self, costs: SegmentCosts, window: int | None, block_size: int, max_segments: int) -> None:
        self._costs = costs
        self._block_size = block_size
        self._seen = None if window is None else -(-window // block_size)
        """The most blocks that a token sees; None: all."""
        self._at: dict[int, _Segment] = {}
        """The segment of each block. A segment may have blocks that stand in another one by now: where all of its
        requests' windows have left them behind, they are given away. What any request still sees is its own."""
        self._lasts: dict[int, tuple[_Segment, int]] = {}
        """The last segment of each slot, and the column in which its first one begins."""
        self._free_numbers = list(range(max_segments, 0, -1))
        self.num_saved = 0
        """Keys of a layer that reading active segments once for all saves in a step."""
        self.changed_segments: dict[int, tuple[int, int, int]] = {}
        """By number: first key, end of the keys, and number of the parent."""
        self.changed_slots: dict[int, int] = {}
        """The number of each slot's last active segment, where it has changed."""

    def enter(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Take in a request that holds `blocks` from the column `first` on."""
        last, column, end = None, first, first + len(blocks)
        path = []
        while column < end:
            rest = blocks[column - first :]
            segment = self._find(rest[0], column)
            if segment is None:
                segment = self._add(column, rest, last)
            elif last is None:
                segment = self._cut(segment, column)[1]
            elif segment.parent is not last or segment.begin != column:
                break  # equal tokens whose blocks stand twice: the request goes on from the other one
            segment = self._cut(segment, column + _num_equal(segment.blocks, rest))[0]
            path.append(segment)
            last, column = segment, segment.end
        if last is not None:
            last.slots.add(slot)
            self._lasts[slot] = last, first
        for segment in path:
            self._count(segment, 1)
        for segment in reversed(path):
            if segment.number:
                break
            if self._pays(segment, self._costs.least_gain):
                self._activate(segment)
                break
        self._tell(slot)

    def leave(self, slot: int) -> None:
        """Forget a request."""
        segment, first = self._lasts.pop(slot, (None, 0))
        if segment is not None:
            segment.slots.remove(slot)
        while segment is not None and segment.begin >= first:
            parent = segment.parent
            self._count(segment, -1)
            if segment.number and not self._pays(segment, self._costs.least_gain // 2):
                self._set_inactive(segment)
                self._tell_below(segment)
            if segment.num_rows == 0:
                self._remove(segment)
            else:
                self._join(segment)
            segment = parent
        if segment is not None:  # the request began behind it
            self._join(segment)

    def _add(self, column: int, blocks: Sequence[int], parent: _Segment | None) -> _Segment:
        """Add a segment of the leading blocks that stand in no other."""
        ends = (place for place, block in enumerate(blocks) if self._find(block, column + place) is not None)
        segment = _Segment(column, list(blocks[: next(ends, len(blocks))]), parent)
        self._at.update(dict.fromkeys(segment.blocks, segment))
        if parent is not None:
            parent.children[segment] = None
        return segment

    def _find(self, block: int, column: int) -> _Segment | None:
        """Return the segment that has a block in this column."""
        segment = self._at.get(block)
        if segment is not None:
            place = column - segment.begin
            if not (0 <= place < len(segment.blocks) and segment.blocks[place] == block):
                return None  # a window has left it behind, and it was given away
        return segment

    def _move(self, blocks: Iterable[int], before: _Segment, after: _Segment) -> None:
        """Note that blocks stand in another segment now."""
        for block in blocks:
            if self._at.get(block) is before:
                self._at[block] = after

    def _remove(self, segment: _Segment) -> None:
        """Drop a segment without requests. Those behind it, if any, are held by requests that began there."""
        for block in segment.blocks:
            if self._at.get(block) is segment:
                del self._at[block]
        if segment.parent is not None:
            del segment.parent.children[segment]
        for child in segment.children:
            child.parent = None
            if child.number:
                self._describe(child)
        if segment.number:
            self._set_inactive(segment)

    def _cut(self, segment: _Segment, column: int) -> tuple[_Segment, _Segment]:
        """Cut a segment before a column; return both parts, or it twice where there is nothing to cut. The second part
        stays the same object."""
        length = column - segment.begin
        if length == 0 or length == len(segment.blocks):
            return segment, segment
        number, parent = segment.number, segment.parent
        if number and not self._free_numbers:
            for below in _with_all_behind(segment):
                if below.number:
                    self._set_inactive(below)
            self._tell_below(segment)
            number = 0
        self.num_saved -= self._saves(segment) if number else 0
        first = _Segment(segment.begin, segment.blocks[:length], parent, {segment: None}, num_rows=segment.num_rows)
        if parent is not None:
            del parent.children[segment]
            parent.children[first] = None
        segment.begin, segment.blocks, segment.parent = column, segment.blocks[length:], first
        self._move(first.blocks, segment, first)
        if number:
            self.num_saved += self._saves(segment)
            self._set_active(first)
            self._describe(segment)
        return first, segment

    def _join(self, segment: _Segment) -> None:
        """Make a segment and the only one behind it one, if the same requests hold both."""
        if len(segment.children) != 1 or segment.slots:
            return
        (child,) = segment.children
        if child.num_rows != segment.num_rows:
            return
        if segment.number:
            self._set_inactive(segment)
            if not child.number:  # the number of no slot changes, as the child takes it over
                child.number = self._free_numbers.pop()
            else:
                self.num_saved -= self._saves(child)
        parent = segment.parent
        child.begin, child.blocks, child.parent = segment.begin, segment.blocks + child.blocks, parent
        self._move(segment.blocks, segment, child)
        if parent is not None:
            del parent.children[segment]
            parent.children[child] = None
        if child.number:
            self.num_saved += self._saves(child)
            self._describe(child)

    # ------------------------------------------------------------------ what is worth it

    def _num_keys(self, segment: _Segment) -> int:
        num_blocks = len(segment.blocks) if self._seen is None else min(len(segment.blocks), self._seen)
        return num_blocks * self._block_size

    def _saves(self, segment: _Segment) -> int:
        """Keys of a layer that reading the segment once for all saves."""
        return (segment.num_rows - 1) * self._num_keys(segment)

    def _pays(self, segment: _Segment, least: int) -> bool:
        num_rows, costs = segment.num_rows, self._costs
        gain = (num_rows - costs.tile) * self._num_keys(segment) - num_rows * costs.partial_result
        return (segment.num_rows > 1 and gain >= least) or any(child.number for child in segment.children)

    def _count(self, segment: _Segment, change: int) -> None:
        segment.num_rows += change
        if segment.number:
            self.num_saved += change * self._num_keys(segment)

    def _activate(self, segment: _Segment) -> None:
        """Make a segment and all before it active, if there are numbers for them."""
        path: list[_Segment] = []
        above: _Segment | None = segment
        while above is not None and not above.number:
            path.append(above)
            above = above.parent
        if len(path) > len(self._free_numbers):
            return
        for inactive in reversed(path):
            self._set_active(inactive)
        self._tell_below(path[-1])

    def _set_active(self, segment: _Segment) -> None:
        segment.number = self._free_numbers.pop()
        self.num_saved += self._saves(segment)
        self._describe(segment)

    def _set_inactive(self, segment: _Segment) -> None:
        self.num_saved -= self._saves(segment)
        self.changed_segments.pop(segment.number, None)
        self._free_numbers.append(segment.number)
        segment.number = 0

    # ------------------------------------------------------------------ what ranks are told

    def _describe(self, segment: _Segment) -> None:
        """Tell of an active segment, and of its place before those behind it."""
        parent = segment.parent.number if segment.parent is not None else 0
        size = self._block_size
        self.changed_segments[segment.number] = segment.begin * size, segment.end * size, parent
        for child in segment.children:
            if child.number:
                self.changed_segments[child.number] = child.begin * size, child.end * size, segment.number

    def _tell(self, slot: int) -> None:
        """Tell of the last active segment of a slot."""
        segment, first = self._lasts.get(slot, (None, 0))
        while segment is not None and not segment.number:
            segment = segment.parent
        self.changed_slots[slot] = 0 if segment is None or segment.begin < first else segment.number

    def _tell_below(self, segment: _Segment) -> None:
        for below in _with_all_behind(segment):
            for slot in below.slots:
                self._tell(slot)

    def _path(self, last: _Segment, first: int) -> list[_Segment]:
        """Return the segments of a request from that in the column `first` on."""
        path: list[_Segment] = []
        segment: _Segment | None = last
        while segment is not None and segment.begin >= first:
            path.insert(0, segment)
            segment = segment.parent
        return path

    def check_integrity(self, tables: dict[int, list[int]], told: dict[int, int]) -> None:
        """Assert that the segments are those of the requests' block tables, by slot, in which 0 stands for a block that
        was given back; `told`: what the ranks will know of the slots."""
        paths = {slot: self._path(*last) for slot, last in self._lasts.items()}
        segments = list(dict.fromkeys(segment for path in paths.values() for segment in path))
        numbers = [segment.number for segment in segments if segment.number]
        assert sorted([*numbers, *self._free_numbers]) == list(range(1, len(numbers) + len(self._free_numbers) + 1))
        assert set(self._at.values()) <= set(segments)
        assert all(block in segment.blocks for block, segment in self._at.items())
        if self._seen is None:
            assert len(self._at) == sum(len(segment.blocks) for segment in segments)
        assert self.num_saved == sum(self._saves(segment) for segment in segments if segment.number)
        assert self._lasts.keys() <= tables.keys()
        num_rows = dict.fromkeys(segments, 0)
        for slot, table in tables.items():
            path = paths.get(slot, [])
            assert not path or path[0].begin == self._lasts[slot][1]
            for segment in path:
                num_rows[segment] += 1
                held = table[segment.begin : segment.end]
                assert all(block in (0, own) for block, own in zip(held, segment.blocks, strict=True))
            active = [segment.number for segment in path if segment.number]
            assert active == [segment.number for segment in path[: len(active)]], "a gap between active segments"
            assert told[slot] == (active[-1] if active else 0)
        for segment in segments:
            assert segment.num_rows == num_rows[segment] > 0
            assert all(child.parent is segment and child.begin == segment.end for child in segment.children)
            assert segment.parent is None or segment in segment.parent.children
            assert all(self._lasts[slot][0] is segment for slot in segment.slots)
            assert (
                len(segment.children) != 1 or segment.slots or next(iter(segment.children)).num_rows > segment.num_rows
            )


class SharedSegments:
    """The segments of all KV groups that have keys, and what is to be told of them."""

    def __init__(
        self,
        windows: dict[int, int | None],
        *,
        block_size: int,
        max_num_seqs: int,
        costs: SegmentCosts | None,
        token_bytes: Sequence[int] = (),
    ) -> None:
        """`windows`: by number, the window of each KV group with keys (None: full attention). `costs`: None where the
        ranks do not read segments; then there are none. `token_bytes`: what a token takes in each KV group, for
        `num_bytes_saved`."""
        self._block_size = block_size
        self._least_saved = 0 if costs is None else costs.least_saved_in_step
        self._forests = {
            group: _Forest(costs, window, block_size, max_num_seqs)
            for group, window in windows.items()
            if costs is not None
        }
        self._counted = {
            group: size for group, size in enumerate(token_bytes) if group in self._forests and windows[group] is None
        }
        self.num_bytes_saved = 0
        """The bytes of keys and values that steps did not read, because they had read them for another row. Groups with
        windows are not counted, whose rows may see a part of a segment."""
        self._inside: set[int] = set()
        """The slots of the requests that are in the forests."""
        self._told: dict[tuple[int, int], int | None] = {}
        """By KV group and slot, the number that the ranks have."""
        self._told_else: int | None = 0
        """The number that they have for all other slots; None: nobody knows."""

    def enter(self, state: RequestState) -> None:
        """Take in a request whose prompt is computed by the steps that were scheduled, unless it is in, or ends with
        the token that they give."""
        assert state.slot is not None
        if state.slot in self._inside or not self._forests or state.max_len <= state.num_tokens + 1:
            return
        self._inside.add(state.slot)
        # The block that the last known token fills is the request's own: that token is always computed.
        num_full = min(state.num_tokens - 1, state.num_computed) // self._block_size
        for group, forest in self._forests.items():
            first = state.first_columns[group]
            forest.enter(state.slot, first, state.blocks[group][first:num_full])

    def leave(self, slot: int) -> None:
        """Forget the request in a slot, if it is in."""
        if slot in self._inside:
            self._inside.remove(slot)
            for forest in self._forests.values():
                forest.leave(slot)

    @property
    def num_saved(self) -> int:
        """Keys of a layer that a step saves, in all groups: those of each active segment, for each row but the
        first."""
        return sum(forest.num_saved for forest in self._forests.values())

    def take_changes(self, num_decodes: int) -> SegmentChanges:
        """Return what the ranks are to be told with the next step, which has so many decode rows."""
        segments: list[tuple[int, int, int, int, int]] = []
        slots: list[tuple[int, int, int]] = []
        for group, forest in self._forests.items():
            for number, (begin, end, parent) in forest.changed_segments.items():
                segments.append((group, number, begin, end, parent))
            for slot, number in forest.changed_slots.items():
                if self._told.get((group, slot), self._told_else) != number:
                    self._told[group, slot] = number
                    slots.append((group, slot, number))
            forest.changed_segments.clear()
            forest.changed_slots.clear()
        num_saved = self.num_saved
        is_used = num_decodes > 1 and num_saved > 0 and num_saved >= self._least_saved
        for group, size in self._counted.items() if is_used else ():
            saved = self._forests[group].num_saved * min(num_decodes, len(self._inside)) // len(self._inside)
            self.num_bytes_saved += saved * size
        return SegmentChanges(segments, slots, is_used)

    def forget_told(self) -> None:
        """Note that steps did not run, so that nobody knows what the ranks have been told. No request is in."""
        assert not self._inside
        self._told.clear()
        self._told_else = None

    def check_integrity(self, states: Iterable[RequestState]) -> None:
        """Assert that the segments are those of the decoding requests, which are among `states`."""
        by_slot = {state.slot: state for state in states if state.slot in self._inside}
        assert by_slot.keys() == self._inside
        for group, forest in self._forests.items():
            tables = {slot: state.blocks[group] for slot, state in by_slot.items() if slot is not None}
            told = {slot: self._told.get((group, slot), self._told_else) for slot in tables} | forest.changed_slots
            forest.check_integrity(tables, {slot: number or 0 for slot, number in told.items()})


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Count the leading blocks that two tables have in common."""
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(place for place in range(shorter) if left[place] != right[place])


def _with_all_behind(segment: _Segment) -> Iterator[_Segment]:
    stack = [segment]
    while stack:
        below = stack.pop()
        yield below
        stack += below.children
