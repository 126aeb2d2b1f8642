"""Homes: where the keys and values of requests are kept, and which home an entering request gets.

Usually a replica has one home: all ranks keep the same blocks, each for its part of the heads. Where attention is
computed by rows (`EngineConfig.enable_attention_dp`) each rank is a home, and computes the attention of its own
requests alone. A home has its own blocks, whose ids count from 1, its own prefix cache, its own forecast of how full
they will be, and its own slots: slot s belongs to home s modulo the number of homes, whatever the limits are. A request
stays in its home while it has a slot; after a preemption it may get another.

Ranks pad a step to the rows and tokens of the fullest home. So a home computes at most its share of a step's tokens,
and requests are spread evenly, even if the prompts of all of them begin as those of one home do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nvcli.engine.admission import Admission
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.block_tables import BlockTables
from nvcli.engine.length_forecast import LengthForecast
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.state import RequestState
from nvcli.engine.step_draft import StepDraft

_UNEVENNESS = 8
"""A home may get a request because of its prefix cache until it runs one more than the home with the fewest requests,
and another one for each `_UNEVENNESS` of those."""


class Home:
    """The blocks, slots and forecast of one home."""

    def __init__(self, number: int, limits: SchedulerLimits, blocks: BlockManager, forecast: LengthForecast) -> None:
        self.number = number
        self.tables = BlockTables(blocks, limits)
        self.admission = Admission(limits, forecast)
        self.free_slots: list[int] = []
        """The end is taken first."""
        self.registered: list[int] = []
        """Blocks registered for reuse since the last step."""

    @property
    def num_running(self) -> int:
        return self.admission.num_running


class Homes:
    """All homes of a replica, by number."""

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager) -> None:
        """`blocks` are those of the first home; the others have as many."""
        managers = [blocks, *(blocks.empty(blocks.num_blocks) for _ in range(limits.num_homes - 1))]
        forecast = LengthForecast()
        self._homes = [Home(number, limits, manager, forecast) for number, manager in enumerate(managers)]
        self.deal_slots(limits.max_num_seqs)

    def __len__(self) -> int:
        return len(self._homes)

    def __iter__(self) -> Iterator[Home]:
        return iter(self._homes)

    def __getitem__(self, number: int) -> Home:
        return self._homes[number]

    def deal_slots(self, num_slots: int) -> None:
        """Deal out all slots. No request may be running."""
        for home in self._homes:
            home.free_slots = list(range(home.number, num_slots, len(self._homes)))[::-1]

    def start_anew(self, limits: SchedulerLimits, num_blocks: int) -> None:
        """Begin again with `num_blocks` empty blocks in each home. No request may be running."""
        for home in self._homes:
            home.tables = BlockTables(home.tables.block_manager.empty(num_blocks), limits)

    def tables_of(self, state: RequestState) -> BlockTables:
        """Return the block tables of the home of a request that holds blocks."""
        return self._homes[state.home].tables

    @property
    def num_free_slots(self) -> int:
        return sum(len(home.free_slots) for home in self._homes)

    @property
    def num_blocks(self) -> int:
        return sum(home.tables.block_manager.num_blocks for home in self._homes)

    @property
    def num_used_blocks(self) -> int:
        return sum(home.tables.block_manager.num_used for home in self._homes)

    @property
    def num_bytes_saved(self) -> int:
        """Bytes of keys and values that steps did not read, because they read them once for several rows."""
        return sum(home.tables.num_bytes_saved for home in self._homes)

    def has_room(self, wanted: Sequence[tuple[RequestState, int]]) -> bool:
        """Whether there are free blocks for this number of further tokens of each request (`BlockTables.has_room`)."""
        return all(home.tables.has_room([one for one in wanted if one[0].home == home.number]) for home in self._homes)

    def share(self, draft: StepDraft, num_decodes: int) -> dict[str, Any]:
        """Return what a step's rows share (`BlockTables.share`): with several homes, nothing."""
        return self._homes[0].tables.share(draft, num_decodes)

    def register(self, state: RequestState) -> None:
        """Register the blocks of a running request that submitted steps have newly filled (`BlockTables.register`)."""
        home = self._homes[state.home]
        home.registered += home.tables.register(state)

    def take_registered(self) -> list[list[int]]:
        """Return the blocks of each home that were registered since the last call."""
        taken = [home.registered for home in self._homes]
        for home in self._homes:
            home.registered = []
        return taken

    def unregister(self, registered: Sequence[Sequence[int]]) -> None:
        """Make blocks of each home unfindable, because the steps that were to fill them did not run."""
        for home, blocks in zip(self._homes, registered, strict=True):
            home.tables.block_manager.unregister(blocks)

    def budgets(self, tokens_per_home: int, rows: Sequence[RequestState], widths: Sequence[int]) -> list[int]:
        """Return the tokens that each home may compute in a step besides these decode rows."""
        if len(self._homes) == 1:
            return [tokens_per_home - sum(widths)]
        budgets = [tokens_per_home] * len(self._homes)
        for state, width in zip(rows, widths, strict=True):
            budgets[state.home] -= width
        return budgets

    def open_to(self, budgets: Sequence[int]) -> list[Home]:
        """Return the homes that have a free slot and some of their `budgets` of tokens left in this step."""
        return [home for home in self._homes if budgets[home.number] > 0 and home.free_slots]

    def enter(
        self, state: RequestState, homes: list[Home], budgets: Sequence[int], step: int
    ) -> tuple[Home, int] | None:
        """Take the first blocks of a waiting request in one of these homes. Returns it and the number of tokens of the
        first chunk (`Admission.enter`); None if the request has to wait."""
        for home in self._in_order(state, homes):
            length = home.admission.enter(state, home.tables, budgets[home.number], step)
            if length is not None:
                return home, length
        return None

    def _in_order(self, state: RequestState, homes: list[Home]) -> list[Home]:
        """Return these homes, the best one for a waiting request first: that whose prefix cache holds most of its
        beginning or, of several, the one with the most free blocks. Those that already run more requests than others
        come last. A request that kept its blocks stays in its home."""
        if state.blocks:
            return [home for home in homes if home.number == state.home]
        if len(homes) < 2:
            return homes
        fewest = min(home.num_running for home in homes)
        most = fewest + 1 + fewest // _UNEVENNESS

        def rank(home: Home) -> tuple[bool, int, int]:
            tables = home.tables
            is_full = home.num_running >= most
            return is_full, -tables.num_cached_blocks(state), -tables.block_manager.num_free

        return sorted(homes, key=rank)
