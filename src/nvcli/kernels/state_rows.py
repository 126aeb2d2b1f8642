"""StateRows: the blocks from which each row of a step reads the recurrent state of its request, and to which it writes
it.

A recurrent state is kept in KV blocks as keys are: the block of a column of a request's table holds the state after the
last token that was computed in that column. So a full block holds the state at its end, from which another request with
the same prefix can continue. A request's first token starts from zeros. A column without a block (the null block) keeps
nothing; the column of a row's last token has one. Two consecutive columns may have the same block: then the row that
begins the second column takes its state along.

The rows of one step that continue from each other's blocks would have to run in order; kernels run rows side by side,
so the engine schedules no such rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.kernels.kept_inputs import PendingTokens


class StateSpan(NamedTuple):
    """Tokens of one row that lie in one block."""

    start: int
    end: int
    """The span has tokens [start, end) of the step."""
    begins_row: bool
    """Whether they are the first of their row; other spans continue from the state after the span before."""
    source: int | None
    """The block whose state the row continues from; None: zeros."""
    target: int
    """The block that takes the state after them; 0, the null block: it is not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRows:
    """The rows of a step in one KV group. It has T tokens and R rows, padding included."""

    block_tables: Tensor
    """[slots, max_blocks] int32."""
    slots: Tensor
    """[R] int64, the row of each row's request in `block_tables`."""
    seq_lens: Tensor
    """[R] int32, tokens of each row's request after this step."""
    query_start_loc: Tensor
    """[R + 1] int32, first token of each row."""
    slot_mapping: Tensor
    """[T] int64, block × block_size + offset of each token."""
    block_size: int
    num_single_rows: int
    """Leading rows of one token each."""
    num_draft_rows: int = 0
    """Leading rows whose tokens may turn out not to count (`kept_inputs.py`). If there are any, none is single."""
    pending: PendingTokens | None = None
    """The tokens that states of rows with drafts do not have yet. Needed if there are any."""

    @property
    def num_decode_rows(self) -> int:
        """Leading rows that are computed token by token; chunks follow."""
        return self.num_single_rows + self.num_draft_rows

    def sources(self) -> Tensor:
        """The block that each row continues from: [R] int64, 0 for rows that start from zeros or have no tokens."""
        before = self.seq_lens.long() - self.query_start_loc.diff()
        columns = (before - 1).clamp_(min=0) // self.block_size
        return torch.where(before > 0, self.block_tables[self.slots, columns].long(), 0)

    def targets(self) -> Tensor:
        """The block of each single row's token: [num_single_rows] int64."""
        return self.slot_mapping[: self.num_single_rows] // self.block_size

    def draft_spans(self) -> Iterator[tuple[int, int, int | None]]:
        """Yield the tokens [start, end) of each row with drafts, and the block whose state it continues from (None:
        zeros). Waits for the device."""
        starts, sources = self.query_start_loc.tolist(), self.sources().tolist()
        for row in range(self.num_draft_rows):
            yield starts[row], starts[row + 1], sources[row] or None

    def spans(self) -> Iterator[StateSpan]:
        """Yield the tokens of the chunks, block by block. Waits for the device."""
        first = self.num_decode_rows
        starts, places = self.query_start_loc.tolist(), self.slot_mapping.tolist()
        sources = self.sources().tolist()
        for row in range(first, len(starts) - 1):
            start = starts[row]
            while start < starts[row + 1]:
                block, offset = divmod(places[start], self.block_size)
                end = min(start + self.block_size - offset, starts[row + 1])
                yield StateSpan(start, end, start == starts[row], sources[row] or None, block)
                start = end
