"""Which running request gives its blocks up when the others have too few."""

from __future__ import annotations

from itertools import islice

from nvcli.engine.block_tables import BlockTables
from nvcli.engine.state import RequestState


def choose_victim(running: dict[RequestState, None], tables: BlockTables) -> RequestState:
    """Return the request to preempt: of those admitted last, the last one that shares no blocks with another.

    A member of a group frees only what it has alone, and the last of its group to go would take the group's prefix out
    of the cache. Only the later half of the requests is looked at, so that the earlier ones come to their ends; if all
    of these share blocks, it is the request admitted last. `running` is in order of admission, with two at least.
    """
    later = islice(reversed(running), len(running) // 2)
    return next((state for state in later if not tables.shares_blocks(state)), next(reversed(running)))
