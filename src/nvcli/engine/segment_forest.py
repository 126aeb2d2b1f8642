"""SegmentForest: the runs of KV blocks that decoding requests share in one KV group, and which of them are worth
reading once for all.

The blocks of the requests form a forest. A *segment* is a run of blocks that the same requests hold; after it they
diverge. A request enters when its prompt is computed and leaves with its slot, at a cost proportional to its blocks and
segments; steps cost nothing. With a window a request may lack the blocks at the beginning: its segments then begin in
the middle of a tree.

A segment worth reading once is *active*: it and all before it have numbers in the ranks' tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from nvcli.kernels.whole_numbers import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCosts:
    """Costs that decide whether segments are worth reading once for all, in keys of a layer that one row reads.

    Measured on an H200 with 8 KV heads of 128 in bf16. There a row reads 1,000 keys in 0.43 us if other rows read them
    too and they come from the L2 cache, as is usual.
    """

    tile: float = 2.0
    """The cost of reading a segment once for all, per key."""
    partial_result: int = 96
    """The cost of writing and reading a row's result for a segment: 1,024 rows with segments of 192 keys take 292 us a
    layer with it and 333 us without."""
    least_gain: int = 512
    """Minimum gain, in keys, at which a segment becomes active; it stays active until it gains less than half of
    that."""
    least_saved_in_step: int = 16_384
    """Minimum saved keys for which a step reads active segments once for all. Such a step launches two more kernels in
    each layer, one for the segments and one that merges, and takes longer to plan. 16 rows that share 2,048 keys
    (30,720 saved) took 25 us a layer against 33 when the segments' kernel was the only extra one."""


@dataclass(slots=True, eq=False)
class _Segment:
    """A run of blocks, in columns [begin, begin + len(blocks)) of the block tables of the same requests."""

    begin: int
    blocks: list[int]
    parent: _Segment | None
    children: dict[_Segment, None] = field(default_factory=dict)
    slots: set[int] = field(default_factory=set)
    """The slots of the requests whose last segment this is."""
    num_rows: int = 0
    """The number of requests that hold its blocks."""
    number: int = 0
    """Its number in the tables of the ranks; 0: it is not active."""

    @property
    def end(self) -> int:
        return self.begin + len(self.blocks)


class SegmentForest:
    """The segments of one KV group."""

    def __init__(self, costs: SegmentCosts, window: int | None, block_size: int, max_segments: int) -> None:
        self._costs = costs
        self._block_size = block_size
        self._most_seen = None if window is None else ceil_div(window, block_size)
        """The most blocks that a token sees; None if it sees all."""
        self._segment_of: dict[int, _Segment] = {}
        """Block → its segment. A segment may list blocks that have since moved to another: once all of its requests'
        windows have passed them, they are reused. Blocks that a request still sees are its own."""
        self._last_of: dict[int, tuple[_Segment, int]] = {}
        """Slot → its last segment, and the column in which its first one begins."""
        self._free_numbers = list(range(max_segments, 0, -1))
        self.num_saved = 0
        """Keys of a layer that a step saves by reading active segments once for all."""
        self.changed_segments: dict[int, tuple[int, int, int]] = {}
        """Number → (first key, end of the keys, parent's number)."""
        self.changed_slots: dict[int, int] = {}
        """Slot → number of its last active segment, where that has changed."""

    def enter(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Add a request that holds `blocks` from the column `first` on."""
        path = self._segments_for(first, blocks)
        if path:
            path[-1].slots.add(slot)
            self._last_of[slot] = path[-1], first
        for segment in path:
            self._count(segment, 1)
        for segment in reversed(path):
            if segment.number:
                break
            if self._pays(segment, self._costs.least_gain):  # nor are those after it active
                self._activate_path(segment)
                break
        self._note_slot(slot)

    def leave(self, slot: int) -> None:
        """Remove a request."""
        segment, first = self._last_of.pop(slot, (None, 0))
        if segment is not None:
            segment.slots.remove(slot)
        while segment is not None and segment.begin >= first:
            parent = segment.parent
            self._count(segment, -1)
            if segment.number and not self._stays_active(segment):
                self._deactivate(segment)
                self._note_slots_below(segment)
            if segment.num_rows == 0:
                self._remove(segment)
            else:
                self._join(segment)
            segment = parent
        if segment is not None:  # the request began after it
            self._join(segment)

    def _segments_for(self, first: int, blocks: Sequence[int]) -> list[_Segment]:
        """Return the segments of these blocks, from the column `first` on, splitting and adding as needed."""
        path: list[_Segment] = []
        column, end = first, first + len(blocks)
        while column < end:
            rest = blocks[column - first :]
            segment = self._find(rest[0], column)
            if segment is None:
                segment = self._add(column, rest, path[-1] if path else None)
            elif not path:
                segment = self._cut(segment, column)[1]
            elif segment.parent is not path[-1] or segment.begin != column:
                break  # equal tokens in duplicate blocks: the request continues from the other copy
            segment = self._cut(segment, column + num_equal(segment.blocks, rest))[0]
            path.append(segment)
            column = segment.end
        return path

    def _add(self, column: int, blocks: Sequence[int], parent: _Segment | None) -> _Segment:
        """Add a segment of the leading blocks that belong to no other."""
        if not self._segment_of.keys().isdisjoint(blocks):
            ends = (place for place, block in enumerate(blocks) if self._find(block, column + place) is not None)
            blocks = blocks[: next(ends, len(blocks))]
        segment = _Segment(column, list(blocks), parent)
        self._segment_of.update(dict.fromkeys(segment.blocks, segment))
        if parent is not None:
            parent.children[segment] = None
        return segment

    def _find(self, block: int, column: int) -> _Segment | None:
        """Return the segment that has a block in this column."""
        segment = self._segment_of.get(block)
        if segment is not None:
            place = column - segment.begin
            if not (0 <= place < len(segment.blocks) and segment.blocks[place] == block):
                return None  # a window has passed it, and it was reused
        return segment

    def _move(self, blocks: Iterable[int], before: _Segment, after: _Segment) -> None:
        """Record that blocks now belong to another segment."""
        for block in blocks:
            if self._segment_of.get(block) is before:
                self._segment_of[block] = after

    def _remove(self, segment: _Segment) -> None:
        """Drop a segment without requests. Segments after it, if any, are held by requests that began there."""
        for block in segment.blocks:
            if self._segment_of.get(block) is segment:
                del self._segment_of[block]
        if segment.parent is not None:
            del segment.parent.children[segment]
        for child in segment.children:
            child.parent = None
            if child.number:
                self._note_segment(child)
        if segment.number:
            self._deactivate(segment)

    def _cut(self, segment: _Segment, column: int) -> tuple[_Segment, _Segment]:
        """Split a segment before a column; return both parts, or the segment twice if there is nothing to split. The
        second part stays the same object."""
        length = column - segment.begin
        if length == 0 or length == len(segment.blocks):
            return segment, segment
        number, parent = segment.number, segment.parent
        if number and not self._free_numbers:
            for below in _with_all_behind(segment):
                if below.number:
                    self._deactivate(below)
            self._note_slots_below(segment)
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
            self._activate(first)
            self._note_segment(segment)
        return first, segment

    def _join(self, segment: _Segment) -> None:
        """Merge a segment with its only child, if the same requests hold both."""
        if len(segment.children) != 1 or segment.slots:
            return
        (child,) = segment.children
        if child.num_rows != segment.num_rows:
            return
        if segment.number:
            self._deactivate(segment)
            if not child.number:  # no slot's number changes, as the child takes it over
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
            self._note_segment(child)

    # ------------------------------------------------------------------ what is worth it

    def _num_keys(self, segment: _Segment) -> int:
        num_blocks = len(segment.blocks) if self._most_seen is None else min(len(segment.blocks), self._most_seen)
        return num_blocks * self._block_size

    def _saves(self, segment: _Segment) -> int:
        """The keys per layer saved by reading the segment once for all."""
        return (segment.num_rows - 1) * self._num_keys(segment)

    def _pays(self, segment: _Segment, least: int) -> bool:
        num_rows, costs = segment.num_rows, self._costs
        gain = (num_rows - costs.tile) * self._num_keys(segment) - num_rows * costs.partial_result
        return segment.num_rows > 1 and gain >= least

    def _stays_active(self, segment: _Segment) -> bool:
        return self._pays(segment, self._costs.least_gain // 2) or any(child.number for child in segment.children)

    def _count(self, segment: _Segment, change: int) -> None:
        segment.num_rows += change
        if segment.number:
            self.num_saved += change * self._num_keys(segment)

    def _activate_path(self, segment: _Segment) -> None:
        """Activate a segment and all before it, if enough numbers are free."""
        path: list[_Segment] = []
        above: _Segment | None = segment
        while above is not None and not above.number:
            path.append(above)
            above = above.parent
        if len(path) > len(self._free_numbers):
            return
        for inactive in reversed(path):
            self._activate(inactive)
        self._note_slots_below(path[-1])

    def _activate(self, segment: _Segment) -> None:
        segment.number = self._free_numbers.pop()
        self.num_saved += self._saves(segment)
        self._note_segment(segment)

    def _deactivate(self, segment: _Segment) -> None:
        self.num_saved -= self._saves(segment)
        self.changed_segments.pop(segment.number, None)
        self._free_numbers.append(segment.number)
        segment.number = 0

    # ------------------------------------------------------------------ what ranks are sent

    def _note_segment(self, segment: _Segment) -> None:
        """Report an active segment and its place, before its children."""
        parent = segment.parent.number if segment.parent is not None else 0
        size = self._block_size
        self.changed_segments[segment.number] = segment.begin * size, segment.end * size, parent
        for child in segment.children:
            if child.number:
                self.changed_segments[child.number] = child.begin * size, child.end * size, segment.number

    def _note_slot(self, slot: int) -> None:
        """Report the last active segment of a slot."""
        segment, first = self._last_of.get(slot, (None, 0))
        while segment is not None and not segment.number:
            segment = segment.parent
        self.changed_slots[slot] = 0 if segment is None or segment.begin < first else segment.number

    def _note_slots_below(self, segment: _Segment) -> None:
        for below in _with_all_behind(segment):
            for slot in below.slots:
                self._note_slot(slot)

    def _path(self, last: _Segment, first: int) -> list[_Segment]:
        """Return a request's segments, starting with the one in the column `first`."""
        path: list[_Segment] = []
        segment: _Segment | None = last
        while segment is not None and segment.begin >= first:
            path.insert(0, segment)
            segment = segment.parent
        return path

    def check_integrity(self, tables: dict[int, list[int]], sent: dict[int, int]) -> None:
        """Assert that the segments are those of the requests' block tables, by slot, in which 0 stands for a block that
        was given back; `sent`: each slot's number as the ranks will know it."""
        paths = {slot: self._path(*last) for slot, last in self._last_of.items()}
        segments = list(dict.fromkeys(segment for path in paths.values() for segment in path))
        numbers = [segment.number for segment in segments if segment.number]
        assert sorted([*numbers, *self._free_numbers]) == list(range(1, len(numbers) + len(self._free_numbers) + 1))
        assert set(self._segment_of.values()) <= set(segments)
        assert all(block in segment.blocks for block, segment in self._segment_of.items())
        if self._most_seen is None:
            assert len(self._segment_of) == sum(len(segment.blocks) for segment in segments)
        assert self.num_saved == sum(self._saves(segment) for segment in segments if segment.number)
        assert self._last_of.keys() <= tables.keys()
        num_rows = dict.fromkeys(segments, 0)
        for slot, table in tables.items():
            path = paths.get(slot, [])
            assert not path or path[0].begin == self._last_of[slot][1]
            for segment in path:
                num_rows[segment] += 1
                held = table[segment.begin : segment.end]
                assert all(block in (0, own) for block, own in zip(held, segment.blocks, strict=True))
            active = [segment.number for segment in path if segment.number]
            assert active == [segment.number for segment in path[: len(active)]], "a gap between active segments"
            assert sent[slot] == (active[-1] if active else 0)
        for segment in segments:
            assert segment.num_rows == num_rows[segment] > 0
            assert all(child.parent is segment and child.begin == segment.end for child in segment.children)
            assert segment.parent is None or segment in segment.parent.children
            assert all(self._last_of[slot][0] is segment for slot in segment.slots)
            assert (
                len(segment.children) != 1 or segment.slots or next(iter(segment.children)).num_rows > segment.num_rows
            )


def num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """Count the leading numbers that two sequences of one type have in common, such as blocks or tokens."""
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
