"""RunningRequests: the requests that hold a slot, with their blocks, from admission until they end or are preempted.

Each of them is either in `prefilling` or in `decoding`. The scheduler moves them from one to the other, and decides
which requests enter; this module keeps slots, blocks and lists in agreement when one enters or leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from nvcli.core.messages import NO_ADAPTER, pack
from nvcli.engine.adapter_places import AdapterPlaces
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.decode_queue import DecodeQueue
from nvcli.engine.homes import Home, Homes
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.merged_adapter import MergedAdapter
from nvcli.engine.state import RequestState
from nvcli.engine.step_draft import StepDraft
from nvcli.kernels.whole_numbers import ceil_div

_MAX_LENGTHS = 512
_REST_SHARE = 1 / 3
"""Share of the blocks that may be in use when requests rest."""


class RunningRequests:
    """The running requests of one replica, in order of admission, and the places of their adapters."""

    def __init__(self, limits: SchedulerLimits, block_manager: BlockManager) -> None:
        self._limits = limits
        self.homes = Homes(limits, block_manager)
        self.prefilling: list[RequestState] = []
        """Requests with known tokens still to be computed, as prefill chunks."""
        self.decoding = DecodeQueue()
        self.adapters = AdapterPlaces(limits.max_loaded_adapters, merged_only=limits.merged_only_adapters)
        self.merged = MergedAdapter(self.adapters, num_slots=limits.max_num_seqs, mergeable=limits.merged_adapters)
        # A state moves with its slot.
        self._may_rest = bool(limits.merged_adapters) and not any(group.is_state for group in limits.kv_groups)
        self._states: dict[RequestState, None] = {}
        self._resting: dict[RequestState, None] = {}
        """Requests that gave their slots back and keep their blocks, until they enter again."""
        self._resumed: list[RequestState] = []
        """Requests that entered after a rest since planning of the current step began."""
        self._freed_slots: list[int] = []
        """Slots released since the last step; the next step tells the ranks."""
        self._bytes_saved_before = 0
        """`num_bytes_saved` before the ranks were last restarted."""

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states)

    def enter(self, state: RequestState, home: Home) -> None:
        """Give a slot of a home to a request that has taken its first blocks there (`Admission.enter`)."""
        state.home, state.slot = home.number, home.free_slots.pop()
        state.adapter_place = self.adapters.hold(state.request.adapter)
        self._resting.pop(state, None)
        self._states[state] = None
        home.tables.entered(state)

    def turn_away(self, state: RequestState, home: Home) -> None:
        """Let a request that has taken its first blocks go on waiting."""
        home.admission.leave(state)
        if state not in self._resting:
            home.tables.release(state)

    def release(self, state: RequestState) -> None:
        """Give a request's slot and blocks back. Steps in flight may still use them, because steps run in order."""
        home = self.homes[state.home]
        home.admission.leave(state)
        home.tables.release(state)
        self._free_slot(state, home)

    def drop(self, state: RequestState) -> bool:
        """Give back everything that an ending request holds. Returns whether it was running."""
        is_running = state.slot is not None
        if is_running:
            self.release(state)
        elif state in self._resting:
            self._end_rest(state)
        return is_running

    def release_resting(self) -> bool:
        """Give back the blocks of the request that began to rest last; return whether there was one."""
        if self._resting:
            self._end_rest(next(reversed(self._resting)))
            return True
        return False

    def end_rest(self) -> None:
        """Give back the blocks of all resting requests."""
        while self.release_resting():
            pass

    def _end_rest(self, state: RequestState) -> None:
        del self._resting[state]
        self.homes[state.home].tables.release(state)

    def _free_slot(self, state: RequestState, home: Home) -> None:
        assert state.slot is not None
        self._freed_slots.append(state.slot)
        home.free_slots.append(state.slot)
        state.slot = None
        self.adapters.release(state.request.adapter, state.adapter_place)
        del self._states[state]
        if state in self.prefilling:
            self.prefilling.remove(state)
        else:
            self.decoding.remove(state)

    def regroup(self, waiting: deque[RequestState], draft: StepDraft, step: int) -> None:
        """Change the adapter that is merged into the weights if that is due (`MergedAdapter`), before the rows of a
        step are chosen. `step`: see `Admission`."""
        has_room = self._may_rest and self.homes.num_used_blocks <= _REST_SHARE * self.homes.num_blocks
        while tail := self.merged.regroup(waiting, self._states.keys(), may_rest=has_room):
            self._rest(tail)
        self._resumed = []
        if self._resting:
            self._resume(waiting, draft, step)

    def rest_on(self, waiting: deque[RequestState]) -> None:
        """Let requests that entered for a step that does not come rest again: no step would tell the ranks about
        them."""
        resumed = [state for state in self._resumed if state.slot is not None]
        self._rest(resumed)
        waiting.extendleft(reversed(resumed))

    def _rest(self, states: Iterable[RequestState]) -> None:
        for state in states:
            state.num_owed = state.num_pending
            home = self.homes[state.home]
            home.admission.leave(state)
            home.tables.leave_slot(state)
            self._free_slot(state, home)
            self._resting[state] = None

    def _resume(self, waiting: deque[RequestState], draft: StepDraft, step: int) -> None:
        """Let the first waiting requests decode again if they rested and lack nothing but their next token. Other
        resting requests enter as prompts do."""
        while waiting and waiting[0] in self._resting:
            state = waiting[0]
            home = self.homes[state.home]
            may_enter = home.free_slots and self.adapters.has_room_for(state.request.adapter)
            if not may_enter or state.num_pending or not state.generated or state.num_uncomputed > 1:
                return
            if home.admission.enter(state, home.tables, 1, step) is None:
                return
            if not draft.has_room_for(state):
                self.turn_away(state, home)
                return
            waiting.popleft()
            self.enter(state, home)
            self._resumed.append(state)
            draft.enter(state)
            state.num_brought = state.num_computed
            if not state.needs_last_token:  # else its row brings the token
                draft.add_tokens(state, state.num_computed, 1)
            self.decoding.add(state)
            home.tables.decodes(state)

    def drop_prefilled(self) -> None:
        """Drop the requests whose known tokens are all scheduled from `prefilling`."""
        self.prefilling = [state for state in self.prefilling if state.num_uncomputed]

    def prefill_again(self, state: RequestState) -> None:
        """Move a decoding request with new known tokens to `prefilling`, before prompts, which would hold it up."""
        self.decoding.remove(state)
        self.prefilling.insert(0, state)

    def choose_victim(self, home: int) -> RequestState:
        """Return the request of a home to preempt, out of at least two: among those admitted last, the last one that
        shares no blocks with another.

        A member of a group frees only its own blocks, and the last member to go would take the group's prefix out of
        the cache. Only the later half of the requests is considered, so that the earlier ones finish; if all of these
        share blocks, it is the request admitted last.
        """
        states = self._at_home(home)
        later = islice(reversed(states), len(states) // 2)
        victims = (state for state in later if not self.homes.tables_of(state).shares_blocks(state))
        return next(victims, next(reversed(states)))

    def _at_home(self, home: int) -> list[RequestState]:
        return [state for state in self._states if state.home == home]

    def take_freed_slots(self) -> list[int]:
        """Return the slots released since the last call."""
        freed, self._freed_slots = self._freed_slots, []
        return freed

    def free_all_slots(self) -> None:
        """Tell the ranks again which slots are free, and load adapters again, because steps that would have told them
        did not run. No request may be running."""
        assert not self._states
        self.adapters.forget()
        self.merged.forget()
        self._freed_slots = list(range(self.homes.num_free_slots))

    def lower_limits(self, limits: SchedulerLimits) -> None:
        """Continue with lower limits. No request may be running."""
        assert not self._states
        self._limits = limits
        self.homes.deal_slots(limits.max_num_seqs)
        self.merged.lower_limits(limits.max_num_seqs)

    def start_anew(self, num_blocks: int) -> None:
        """Start over with new ranks, whose slots and KV blocks are empty. No request may be running."""
        assert not self._states
        self._bytes_saved_before += self.homes.num_bytes_saved
        self.homes.start_anew(self._limits, num_blocks)
        self._freed_slots = []

    @property
    def num_bytes_saved(self) -> int:
        """Bytes of keys and values that steps did not read, because they read them once for several rows."""
        return self._bytes_saved_before + self.homes.num_bytes_saved

    def lengths(self) -> bytes:
        """Return the lengths of the answers (`EngineStats.running_lengths`): of all requests if at most `_MAX_LENGTHS`
        run, else of every n-th."""
        stride = ceil_div(len(self._states), _MAX_LENGTHS) or 1
        states = islice(self._states, 0, None, stride)
        numbers = ((len(state.generated), state.request.max_tokens, state.num_prompt) for state in states)
        return pack([number for triple in numbers for number in triple])

    def check_integrity(self) -> None:
        """Assert that slots, lists, bounds and blocks agree."""
        free_slots = []
        for home in self.homes:
            at_home = self._at_home(home.number)
            resting = [state for state in self._resting if state.home == home.number]
            home.tables.check_integrity([*at_home, *resting])
            home.admission.check_integrity(at_home)
            assert all(state.slot is not None and state.slot % len(self.homes) == home.number for state in at_home)
            free_slots += home.free_slots
        assert all(state.slot is None and state.blocks and not state.finished for state in self._resting)
        slots = [state.slot for state in self._states if state.slot is not None]
        assert len(slots) == len(self._states)
        assert sorted([*free_slots, *slots]) == list(range(self._limits.max_num_seqs))
        self.adapters.check_integrity(
            [(state.request.adapter, state.adapter_place) for state in self._states if state.adapter_place]
        )
        for state in self._states:
            has_own = state.request.adapter != self.adapters.merged
            assert bool(state.adapter_place) == has_own, "a running request has the weights of another adapter"
            assert not has_own or self.adapters.merged == NO_ADAPTER
        self.decoding.check_integrity(self.prefilling, self._states)
        for state in self.prefilling:
            assert not state.num_pending
            assert state.num_computed < state.num_tokens
        for state in self._states:
            assert not state.finished
            assert state.num_computed < self._limits.max_model_len + self._limits.drafting.most_tokens
            assert state.num_tokens < state.max_len


def lacking_room(rows: Sequence[RequestState], widths: Sequence[int]) -> list[tuple[RequestState, int]]:
    """Return the requests that need blocks for their next tokens, with the numbers of these tokens."""
    return [(state, n) for state, n in zip(rows, widths, strict=True) if state.num_computed + n > state.capacity]
