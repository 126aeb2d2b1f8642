"""The segments that decoding requests share: what is read once for all, and what ranks are told of it.

`test_random_engine.py` checks them against the block tables of random engines.
"""

from __future__ import annotations

from typing import NamedTuple

from nvcli.core.messages import unpack
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.scheduler import Scheduler
from nvcli.engine.segment_forest import SegmentCosts
from nvcli.engine.shared_segments import SharedSegments
from nvcli.engine.state import Prompt, RequestState
from requests_factory import make_request

BLOCK_SIZE = 64
SHARED = list(range(1, 33))
"""Blocks of 2,048 tokens."""


def make_segments(windows: dict[int, int | None] | None = None, costs: SegmentCosts | None = None) -> SharedSegments:
    return SharedSegments(
        windows or {0: None},
        block_size=BLOCK_SIZE,
        max_num_seqs=256,
        costs=costs or SegmentCosts(),
        token_bytes=[10, 1000],
    )


def enter(segments: SharedSegments, slot: int, *tables: list[int], max_tokens: int = 8) -> RequestState:
    """Let a request in whose blocks, of each group, are all full of prompt tokens; 0: a window has left it behind."""
    num_tokens = len(tables[0]) * BLOCK_SIZE + 1
    request = make_request(slot, [3] * num_tokens, max_tokens)
    state = RequestState(request, Prompt(request))
    state.slot, state.num_computed = slot, num_tokens
    state.blocks = [list(table) for table in tables]
    state.first_columns = [next(column for column, block in enumerate(table) if block) for table in tables]
    segments.enter(state)
    return state


class Changes(NamedTuple):
    segments: list[tuple[int, ...]]
    """(KV group, number, first key, end of the keys, parent's number or 0)"""
    slots: list[tuple[int, ...]]
    """(KV group, slot, number of its last active segment or 0)"""
    is_used: bool


def take_changes(segments: SharedSegments, num_decodes: int) -> Changes:
    """What the next step tells the ranks."""
    fields = segments.take_changes(num_decodes)
    numbers, slots = iter(unpack(fields["segments"])), iter(unpack(fields["slot_segments"]))
    of_segments = list(zip(*[numbers] * 5, strict=True))
    return Changes(of_segments, list(zip(*[slots] * 3, strict=True)), fields["shares_segments"])


def test_many_rows_behind_a_long_prefix_read_it_once() -> None:
    segments = make_segments()
    states = [enter(segments, slot, [*SHARED, 100 + slot]) for slot in range(64)]
    changes = take_changes(segments, 64)
    assert changes.is_used
    assert changes.segments == [(0, 1, 0, 2048, 0)]
    assert changes.slots == [(0, slot, 1) for slot in range(64)]
    assert segments.num_saved == 63 * 2048
    segments.check_integrity(states)
    changes = take_changes(segments, 64)
    assert changes.is_used
    assert changes.segments == changes.slots == [], "ranks are told what changed"
    assert segments.num_bytes_saved == 2 * 10 * 63 * 2048
    take_changes(segments, 32)  # a step for half of them
    assert segments.num_bytes_saved == 2.5 * 10 * 63 * 2048
    take_changes(segments, 0)  # a step of prompts
    assert segments.num_bytes_saved == 2.5 * 10 * 63 * 2048


def test_what_does_not_pay_is_not_read_once() -> None:
    """Two rows, a prefix of one block, and rows that share nothing: ranks are told nothing at all."""
    segments = make_segments()
    for slot in range(2):
        enter(segments, slot, [*SHARED, 100 + slot])
    for slot in range(2, 60):
        enter(segments, slot, [40, 100 + slot])
    for slot in range(60, 120):
        enter(segments, slot, [100 + slot, 300 + slot])
    changes = take_changes(segments, 64)
    assert changes.segments == changes.slots == []
    assert not changes.is_used
    assert segments.num_saved == 0


def test_a_step_reads_once_where_all_groups_together_save_enough() -> None:
    segments = make_segments()
    used = []
    for group in range(30):
        for member in range(4):
            enter(segments, 4 * group + member, [1000 * group + block for block in range(1, 11)])
        used.append(take_changes(segments, 64).is_used)
        assert segments.num_saved == 3 * 640 * (group + 1)
    assert used == [3 * 640 * (group + 1) >= 16_384 for group in range(30)]


def test_a_segment_is_read_once_until_too_few_rows_are_left() -> None:
    segments = make_segments()
    states = [enter(segments, slot, [*SHARED, 100 + slot]) for slot in range(64)]
    take_changes(segments, 64)
    for slot in range(62):
        segments.leave(slot)
        segments.check_integrity(states[slot + 1 :])
    changes = take_changes(segments, 64)
    assert sorted(changes.slots) == [(0, 62, 0), (0, 63, 0)]
    assert not changes.is_used
    assert segments.num_saved == 0
    # The slots of those who left may still name the segment, until a request that does not have it comes.
    enter(segments, 5, [200, 201])
    assert take_changes(segments, 64).slots == [(0, 5, 0)]


def test_a_request_that_should_end_with_its_first_token_does_not_decode_over_the_segments_of_its_slot() -> None:
    """Its steps may give no token; it decodes then, and reads all of its keys on its own."""
    segments = make_segments()
    for slot in range(64):
        enter(segments, slot, [*SHARED, 100 + slot])
    take_changes(segments, 64)
    segments.leave(5)
    enter(segments, 5, [200, 201], max_tokens=1)
    assert take_changes(segments, 64).slots == [(0, 5, 0)]
    enter(segments, 70, [202, 203], max_tokens=1)
    assert take_changes(segments, 64).slots == [], "its slot has had no segment"


def test_variants_cut_a_segment_and_leave_the_slots_of_others_alone() -> None:
    segments = make_segments()
    states = [enter(segments, slot, [*SHARED, 100 + slot]) for slot in range(64)]
    take_changes(segments, 64)
    states.append(enter(segments, 64, [*SHARED[:8], 300, 301]))
    changes = take_changes(segments, 64)
    assert sorted(changes.segments) == [(0, 1, 512, 2048, 2), (0, 2, 0, 512, 0)]
    assert changes.slots == [(0, 64, 2)]
    segments.check_integrity(states)
    # Once it has left, both are one segment again.
    segments.leave(64)
    assert take_changes(segments, 64).segments == [(0, 1, 0, 2048, 0)]
    segments.check_integrity(states[:64])


def test_rows_that_lack_what_their_window_has_left_behind_share_the_rest() -> None:
    segments = make_segments({0: None, 1: 1024})
    whole = [*SHARED, 100]
    late = [0] * 16 + [block + 500 for block in SHARED[16:]]
    states = [enter(segments, slot, [*SHARED, 100 + slot], [*late, 600 + slot]) for slot in range(1, 40)]
    early = [block + 500 for block in SHARED]
    states.append(enter(segments, 0, whole, [*early, 600]))
    changes = take_changes(segments, 64)
    assert (0, 1, 0, 2048, 0) in changes.segments
    assert [entry for entry in changes.segments if entry[0] == 1] == [(1, 1, 1024, 2048, 0)]
    assert segments.num_bytes_saved == 39 * 2048 * 10, "not those of windows"
    segments.check_integrity(states)


def test_nobody_knows_what_was_told_in_steps_that_did_not_run() -> None:
    segments = make_segments()
    for slot in range(64):
        enter(segments, slot, [*SHARED, 100 + slot])
    take_changes(segments, 64)
    for slot in range(64):
        segments.leave(slot)
    take_changes(segments, 64)
    segments.forget_sent()
    enter(segments, 7, [200, 201])
    enter(segments, 8, [202, 203])
    assert take_changes(segments, 64).slots == [(0, 7, 0), (0, 8, 0)]


def test_ranks_are_told_again_what_steps_that_were_taken_back_told() -> None:
    costs = SegmentCosts(tile=1, partial_result=0, least_gain=1, least_saved_in_step=1)
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, block_size=4, segment_costs=costs
    )
    scheduler = Scheduler(limits, BlockManager(100))
    scheduler.add(make_request(i, [*range(8), 50 + i], 20) for i in range(4))
    told = []
    for _ in range(2):
        step = scheduler.schedule()
        assert step is not None
        told.append((unpack(step.input.segments), unpack(step.input.slot_segments)))
        scheduler.put_back([step])
    assert told[0] == told[1]
    assert len(told[0][1]) == 3 * 4, "a number for each slot"


def test_without_costs_there_are_no_segments() -> None:
    segments = SharedSegments({0: None}, block_size=BLOCK_SIZE, max_num_seqs=256, costs=None)
    for slot in range(64):
        enter(segments, slot, [*SHARED, 100 + slot])
    changes = take_changes(segments, 64)
    assert changes.segments == changes.slots == []
    assert not changes.is_used
