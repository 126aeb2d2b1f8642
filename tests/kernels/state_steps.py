"""Steps over recurrent states: rows of any lengths, whose requests have a past or not."""

from __future__ import annotations

from itertools import accumulate

import torch

from nvcli.kernels.kept_inputs import PendingTokens
from nvcli.kernels.state_rows import StateRows


def make_rows(
    work: list[tuple[int, int]],
    tables: list[list[int]],
    *,
    block_size: int,
    num_single: int = 0,
    num_drafts: int = 0,
    padding: int = 0,
    pending: PendingTokens | None = None,
) -> StateRows:
    """Rows of (tokens before, tokens) of requests with these block tables; `padding` tokens behind them are nobody's.

    The first rows are single ones, or have drafts; by default nothing is pending. Rows of a table without blocks are
    padding rows. Slots are dealt in reverse order.
    """
    num_slots, width = len(work) + 1, max(map(len, tables)) + 1
    block_tables = torch.zeros(num_slots, width, dtype=torch.int32)
    places: list[int] = []
    for row, ((before, count), table) in enumerate(zip(work, tables, strict=True)):
        block_tables[num_slots - 1 - row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        blocks = table or [0]
        places += [blocks[p // block_size] * block_size + p % block_size for p in range(before, before + count)]
    starts = accumulate((count for _, count in work), initial=0)
    return StateRows(
        block_tables=block_tables,
        slots=torch.arange(num_slots - 1, 0, -1),
        seq_lens=torch.tensor([before + count for before, count in work], dtype=torch.int32),
        query_start_loc=torch.tensor(list(starts), dtype=torch.int32),
        slot_mapping=torch.tensor([*places, *[0] * padding]),
        block_size=block_size,
        num_single_rows=num_single,
        num_draft_rows=num_drafts,
        pending=pending or PendingTokens.empty(len(work), torch.zeros(1, dtype=torch.int32)),
    )
