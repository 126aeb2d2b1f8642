"""Requests hold the blocks that each KV group needs, and find those of earlier ones as far as every group allows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from nvcli.core.messages import KVGroup
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.block_tables import BlockTables
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.state import Prompt, RequestState
from nvcli.engine.step_draft import StepDraft
from requests_factory import make_request

BLOCK_SIZE = 4
FULL, WINDOW, STATE = KVGroup(), KVGroup(window=6), KVGroup(window=2, is_state=True)
SPANNING = KVGroup(span=4)


def limits_of(groups: tuple[KVGroup, ...]) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=100, max_num_batched_tokens=1000, max_model_len=2000, block_size=BLOCK_SIZE, kv_groups=groups
    )


class Requests:
    """Requests that enter, compute and leave, without a scheduler."""

    def __init__(self, groups: tuple[KVGroup, ...], num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks)
        self.tables = BlockTables(self.manager, limits_of(groups))
        self.running: list[RequestState] = []
        self.num_entered = 0

    def enter(self, prompt: list[int], *, chunk: int = 1, reserve: int = 0) -> RequestState | None:
        """A request whose first chunk has at most so many tokens, which are not computed yet, in a step of its own."""
        self.tables.begin_step()
        request = make_request(self.num_entered, prompt, 1000)
        state = RequestState(request, Prompt(request))
        if self.tables.enter(state, chunk, reserve=reserve) is None:
            return None
        state.slot = self.num_entered
        self.num_entered += 1
        self.running.append(state)
        return state

    def compute(self, state: RequestState, num_tokens: int) -> int:
        """As many of these tokens as there is room for, as a chunk or, behind the known tokens, as a decode row."""
        if state.num_computed + num_tokens > state.capacity:
            num_tokens = self.tables.grow(state, num_tokens, StepDraft(limits_of((FULL,))), least=1)
        state.num_computed += num_tokens
        self.tables.register(state)
        return num_tokens

    def compute_all(self, prompt: list[int], chunk: int) -> RequestState:
        state = self.enter(prompt, chunk=chunk)
        assert state is not None
        assert self.compute(state, min(chunk, state.num_uncomputed)) > 0
        while state.num_uncomputed:
            self.tables.begin_step()
            assert self.compute(state, min(chunk, state.num_uncomputed)) > 0
        return state

    def decode(self, state: RequestState, num_tokens: int) -> None:
        """So many decode rows, whose tokens come back."""
        for token in range(num_tokens):
            state.generated.append(token)
            assert self.compute(state, 1) == 1
            self.tables.begin_step()
            self.tables.check_integrity(self.running)

    def leave(self, state: RequestState) -> None:
        self.running.remove(state)
        self.tables.release(state)
        self.tables.check_integrity(self.running)

    def num_held(self, state: RequestState) -> list[int]:
        """Blocks that a request holds of each group."""
        return [sum(block > 0 for block in blocks) for blocks in state.blocks]


def test_blocks_behind_a_window_are_freed_between_chunks() -> None:
    """The next chunk's first token attends to itself and the 5 before it."""
    requests = Requests((FULL, WINDOW), 40)
    state = requests.enter(list(range(40)))
    assert state is not None
    assert requests.num_held(state) == [10, 1]
    assert requests.compute(state, 8) == 8
    assert requests.num_held(state) == [10, 2]
    requests.compute(state, 4)  # the first of them is token 8, which attends to tokens 3 to 8
    assert requests.num_held(state) == [10, 3]
    requests.compute(state, 8)  # token 12 attends to tokens 7 to 12
    assert requests.num_held(state) == [10, 4]
    assert state.blocks[1][:1] == [0]


def test_blocks_behind_a_long_chunk_are_freed_before_the_next_step_is_planned() -> None:
    """Also where the request needs no new block: the last token of the prompt attends to itself and the 5 before it."""
    requests = Requests((FULL, WINDOW), 40)
    other = requests.compute_all(list(range(100, 107)), 7)
    state = requests.compute_all(list(range(38)), 38)
    assert requests.num_held(state) == [10, 10]
    requests.tables.begin_step()
    assert requests.num_held(state) == [10, 2]
    assert requests.num_held(other) == [2, 2]
    requests.tables.check_integrity(requests.running)
    gone = requests.enter(list(range(200, 238)), chunk=38)
    assert gone is not None
    requests.leave(gone)
    requests.tables.begin_step()  # one that has given all back is passed over
    requests.tables.check_integrity(requests.running)


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (FULL, STATE)], ids=["window", "state"])
def test_a_request_that_was_turned_away_may_hold_blocks_of_another_home(groups: tuple[KVGroup, ...]) -> None:
    """Blocks have the same ids in all homes: the home that it left frees none of them."""
    homes = [Requests(groups, 40), Requests(groups, 40)]
    for home in homes:
        home.compute_all(list(range(100, 138)), 38)
        home.tables.begin_step()
    request = make_request(1, list(range(38)), 1000)
    state = RequestState(request, Prompt(request))
    for home in homes:
        assert home.tables.enter(state, 38, reserve=0) == 38
        if home is homes[0]:
            home.tables.release(state)
    state.slot = 1
    homes[1].running.append(state)
    homes[1].compute(state, 38)
    for home in homes:
        home.tables.begin_step()
        home.tables.check_integrity(home.running)


def test_ranks_forget_states_of_drafts_in_columns_that_a_chunk_skips() -> None:
    """Else the chunk, such as one of forced tokens, would write its states into blocks that others hold by now."""
    requests = Requests((FULL, STATE), 100)
    state = requests.compute_all(list(range(6)), 6)
    state.generated.append(1)
    assert requests.compute(state, 6) == 6  # up to column 2
    state.num_computed = 7
    requests.tables.trim(state)
    state.generated.extend(range(12))
    draft = StepDraft(limits_of((FULL,)))
    assert requests.tables.grow(state, 11, draft, least=1) == 11
    told = {column: blocks for group, _, column, blocks in draft._blocks if group == 1}
    assert (told[2], told[3], told[4]) == ([0], [0], state.blocks[1][4:])


def test_a_chunk_is_as_long_as_there_are_blocks() -> None:
    requests = Requests((WINDOW,), 4)
    state = requests.enter(list(range(40)))
    assert state is not None
    assert requests.compute(state, 40) == 16
    chunks = []
    while state.num_uncomputed:
        chunks.append(requests.compute(state, state.num_uncomputed))
    assert chunks == [8, 8, 8]
    requests.tables.check_integrity(requests.running)


def test_no_block_is_taken_where_there_is_room_for_too_few_tokens() -> None:
    requests = Requests((FULL,), 3)
    state = requests.compute_all(list(range(7)), 7)
    assert requests.tables.grow(state, 6, StepDraft(limits_of((FULL,))), least=6) == 5
    assert requests.num_held(state) == [2]
    assert requests.tables.grow(state, 6, StepDraft(limits_of((FULL,))), least=5) == 5
    assert requests.num_held(state) == [3]
    assert requests.tables.grow(state, 6, StepDraft(limits_of((FULL,))), least=6) == 5


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), (FULL, WINDOW), (WINDOW, FULL, KVGroup(window=11))])
def test_an_equal_prompt_finds_all_blocks_but_the_last_tokens(groups: tuple[KVGroup, ...]) -> None:
    """Also where the blocks behind the window were freed long ago: they keep their contents until they are needed."""
    requests = Requests(groups, 100)
    prompt = list(range(40))
    requests.leave(requests.compute_all(prompt, 5))
    again = requests.enter(prompt)
    assert again is not None
    assert again.num_computed == 36
    for group, first in zip(groups, again.first_columns, strict=True):
        # Token 36 attends to 31 and on in a window of 6, to 26 and on in one of 11.
        assert first == {None: 0, 6: 7, 11: 6}[group.window]
    requests.tables.check_integrity(requests.running)


def test_a_window_needs_only_its_own_blocks_of_a_prefix() -> None:
    requests = Requests((WINDOW,), 100)
    prompt = list(range(40))
    first = requests.compute_all(prompt, 40)
    blocks = first.blocks[0].copy()
    requests.leave(first)
    requests.manager.unregister(blocks[:6])
    again = requests.enter(prompt)
    assert again is not None
    assert (again.num_computed, again.blocks[0][:9]) == (36, [0] * 7 + blocks[7:9])
    requests.leave(again)
    requests.manager.unregister(blocks[7:8])  # tokens 36 and 32 need it, and token 28 needs block 5
    last = requests.enter(prompt)
    assert last is not None
    assert last.num_computed == 0


def test_the_hit_is_the_longest_that_all_groups_allow() -> None:
    """Group 0 has lost its blocks from the sixth on; the window before that is whole only up to the fourth."""
    requests = Requests((FULL, WINDOW), 100)
    prompt = list(range(40))
    first = requests.compute_all(prompt, 40)
    full, windowed = (blocks.copy() for blocks in first.blocks)
    requests.leave(first)
    requests.manager.unregister([full[6], windowed[4]])
    again = requests.enter(prompt)
    assert again is not None
    # 24 tokens need windowed blocks 4 and 5, 20 tokens 3 and 4, 16 tokens 2 and 3.
    assert again.num_computed == 16
    assert again.blocks[0][:4] == full[:4]
    assert again.blocks[1][:4] == [0, 0, *windowed[2:4]]


def test_a_prefix_ends_behind_a_whole_number_of_the_widest_spans() -> None:
    """A block of the second group holds 16 tokens, so that the first 2 of its 3 may be reused, with the window that
    ends there."""
    requests = Requests((WINDOW, SPANNING), 40)
    first = requests.compute_all(list(range(43)), 4)
    assert requests.num_held(first) == [3, 3]
    again = requests.enter(list(range(43)))
    assert again is not None
    assert again.num_computed == 32
    assert again.blocks[1][:2] == first.blocks[1][:2]
    assert again.blocks[1][2] != first.blocks[1][2]
    assert again.first_columns == [6, 0]
    requests.tables.check_integrity(requests.running)


def test_groups_do_not_share_blocks() -> None:
    requests = Requests((FULL, KVGroup(window=100)), 100)
    prompt = list(range(16))
    states = [requests.compute_all(prompt, 16) for _ in range(2)]
    assert states[0].blocks[0][:3] == states[1].blocks[0][:3]
    assert states[0].blocks[1][:3] == states[1].blocks[1][:3]
    assert not set(states[0].blocks[0]) & set(states[0].blocks[1])


def test_of_its_states_a_request_keeps_the_one_that_it_goes_on_from() -> None:
    """Behind each chunk of a prompt, and in an answer, where the block goes along from column to column."""
    requests = Requests((FULL, STATE, STATE), 100)
    state = requests.enter(list(range(42)), chunk=14)
    assert state is not None
    for num_columns in (4, 7):
        requests.compute(state, 14)
        requests.tables.begin_step()
        assert requests.num_held(state) == [11, 1, 1]
        assert [blocks.index(blocks[-1]) for blocks in state.blocks[1:]] == [num_columns - 1] * 2
    requests.compute(state, 14)
    requests.tables.begin_step()
    assert requests.num_held(state) == [11, 1, 1]
    states = [blocks[-1] for blocks in state.blocks[1:]]
    requests.decode(state, 30)
    assert requests.num_held(state) == [18, 1, 1]
    assert [blocks[-1] for blocks in state.blocks[1:]] == states
    requests.leave(state)


def test_an_equal_prompt_goes_on_from_the_state_behind_the_last_full_block() -> None:
    requests = Requests((FULL, STATE), 100)
    for prompt in (list(range(40)), list(range(42))):
        requests.leave(requests.compute_all(prompt, 40))
        again = requests.enter(prompt, chunk=40)
        assert again is not None
        assert again.num_computed == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        requests.compute(again, 40)
        requests.leave(again)


def test_states_are_kept_where_prompts_part() -> None:
    """The first one leaves none there. The second finds its keys, computes it all and leaves one for the others."""
    requests = Requests((FULL, STATE), 100)
    common = list(range(22))
    found = []
    for number in range(4):
        state = requests.enter([*common, *range(100 * number, 100 * number + 20)], chunk=100)
        assert state is not None
        found.append(state.num_computed)
        requests.compute(state, state.num_uncomputed)
        requests.tables.begin_step()
        assert requests.num_held(state) == [11, 1]
    assert found == [0, 0, 20, 20]
    requests.tables.check_integrity(requests.running)


def test_a_long_prompt_leaves_a_state_for_each_of_its_chunks() -> None:
    requests = Requests((FULL, STATE), 100)
    prompt = list(range(100))
    requests.leave(requests.compute_all(prompt, 31))
    other = requests.enter([*prompt[:70], 7], chunk=30)
    assert other is not None
    assert other.num_computed == 64, "the second chunk ended with token 61, in the column before"


def test_states_are_kept_only_in_blocks_that_nobody_needs() -> None:
    """And none of them is counted where requests are admitted: one keeps its state in the same block."""
    groups = (FULL, STATE, STATE)
    requests = Requests(groups, 10 + 2)
    assert requests.tables.can_fit(40)
    assert not requests.tables.can_fit(41)
    assert requests.tables.reserve(7) == 7
    state = requests.compute_all(list(range(36)), 10)
    requests.decode(state, 4)
    assert requests.manager.num_free == 0
    requests.leave(state)
    again = requests.enter(list(range(36)), chunk=40)
    assert again is not None
    assert again.num_computed == 0, "there was no room for a state behind the last full block"
    reserved = Requests(groups, 11 + 2 + 3)
    assert reserved.enter(list(range(42)), chunk=42, reserve=3) is not None
    assert reserved.manager.num_free == 3


def test_a_lone_request_takes_the_state_that_it_found_along() -> None:
    """There is no room for another one."""
    requests = Requests((FULL, STATE), 12)
    prompt = list(range(40))
    requests.leave(requests.compute_all(prompt, 40))
    again = requests.enter(prompt, chunk=40)
    assert again is not None
    assert again.num_computed == 36
    found = again.blocks[1][8]
    rival = requests.enter(prompt, chunk=40)
    assert rival is None
    requests.leave(again)
    filler = requests.manager.allocate(requests.manager.num_free - 11)
    again = requests.enter(prompt, chunk=40)
    assert filler is not None
    assert again is not None
    assert again.blocks[1][8:] == [found, found], "it stands in both columns, as the ranks read the first"
    requests.manager.release(filler)
    requests.leave(again)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9, 30])
@pytest.mark.parametrize("num_tokens", [1, 4, 5, 9, 14, 23])
def test_what_can_fit_fits_with_one_token_at_a_time(window: int, num_tokens: int) -> None:
    groups = (FULL, KVGroup(window))
    needed = next(n for n in range(1, 50) if BlockTables(BlockManager(n), limits_of(groups)).can_fit(num_tokens))
    requests = Requests(groups, needed)
    state = requests.compute_all(list(range(num_tokens)), 1)
    assert state.num_computed == num_tokens
    scarce = Requests(groups, needed - 1)
    stuck = scarce.enter(list(range(num_tokens)))
    while stuck is not None and stuck.num_uncomputed and scarce.compute(stuck, 1):
        pass
    assert stuck is None or stuck.num_uncomputed


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_operations_keep_integrity(data: st.DataObject) -> None:
    """Requests of few different tokens enter, compute, lose tokens that did not count, and leave, in any order. What a
    request finds in the cache was written for the same tokens in the same group."""
    kinds = [*map(KVGroup, (None, 1, 3, 6, 9)), SPANNING, replace(SPANNING, span=2)]
    groups = tuple(data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3)))
    requests = Requests(groups, data.draw(st.integers(1, 40)))
    contents: dict[int, tuple[int, tuple[int, ...]]] = {}

    def write(state: RequestState, start: int, known: int) -> None:
        for group, blocks in enumerate(state.blocks):
            size = groups[group].span * BLOCK_SIZE
            for column in range(start // size, -(-state.num_computed // size)):
                end = (column + 1) * size
                contents[blocks[column]] = (group, tuple(state.tokens(0, end))) if end <= known else (group, ())

    for _ in range(data.draw(st.integers(1, 40))):
        running = requests.running
        state = data.draw(st.sampled_from(running)) if running else None
        action = data.draw(st.sampled_from(["enter", "compute", "count", "leave", "forget"]))
        if action == "enter":
            prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=30))
            entered = requests.enter(prompt, reserve=data.draw(st.integers(0, 3)))
            if entered is not None:
                for group, blocks in enumerate(entered.blocks):
                    size = groups[group].span * BLOCK_SIZE
                    for column in range(entered.first_columns[group], entered.num_computed // size):
                        expected = (group, tuple(prompt[: (column + 1) * size]))
                        assert contents[blocks[column]] == expected
        elif state is None:
            continue
        elif action == "compute":
            start = state.num_computed
            most = state.num_uncomputed if state.num_uncomputed > 0 else 5
            requests.compute(state, data.draw(st.integers(1, most)))
            write(state, start, min(state.num_tokens, state.num_computed))
        elif action == "count" and state.num_computed >= state.num_tokens:
            tokens = data.draw(st.lists(st.integers(0, 1), max_size=state.num_computed + 1 - state.num_tokens))
            num_known = state.num_tokens
            state.generated.extend(tokens)
            state.num_computed = state.num_tokens - 1
            requests.tables.trim(state)
            # Where no token counts, the last one is computed again, whose keys are there.
            write(state, num_known - 1, max(num_known, state.num_computed))
            requests.tables.register(state)
        elif action == "leave":
            requests.leave(state)
        elif action == "forget":
            requests.manager.forget_prefixes()
        requests.tables.check_integrity(requests.running)
