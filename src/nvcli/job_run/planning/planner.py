"""Chooses the row that goes to a replica next, among the rows that were read ahead.

- Rows that begin alike go one after the other to one replica, so that their prefix is computed once and need not
  outlive others in the KV cache. The longest common prefix goes on first.
- Otherwise rows with a large `max_tokens` go first, so that a run does not end with a few long answers. Lengths are
  compared by their order of magnitude; a row without `max_tokens` may become the longest, and so may one whose caller
  wants answers in order. Equals keep their order.
- No row is passed over by more than `max_passed_over` later ones.

Rows that are there are given out at once; nothing waits for the window to fill. A row's answer does not depend on when
it is computed, so a plan changes the speed of a run and the order of its output, and nothing else. The planner knows no
engine, clock or file.
"""

from __future__ import annotations

from collections import deque

from nvcli.job_run.planning.prefix_tree import PrefixTree, WaitingRow
from nvcli.job_run.text.prepare import PreparedRow

_MAX_LENGTH_CLASS = 64
"""The length class of rows without `max_tokens`."""
_MAX_CANDIDATES = 8
"""A replica looks past this many rows with prefixes of another replica before it takes one of them."""


class Planner:
    """The rows that wait for a replica. Not thread-safe."""

    def __init__(
        self,
        *,
        block_size: int | None,
        max_rows: int,
        max_bytes: int,
        max_passed_over: int,
        num_replicas: int = 1,
        longest_first: bool = True,
    ) -> None:
        """`block_size` is the number of tokens in a KV block; None: prefixes do not matter.

        `max_rows` and `max_bytes` (by `PreparedRow.num_bytes`) say when the planner is full; `max_passed_over` is the
        most later rows that may go before a row.
        """
        assert max_passed_over >= 0
        self._tree: PrefixTree[PreparedRow] = PrefixTree(block_size or 1)
        self._shares_prefixes = block_size is not None
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._max_passed_over = max_passed_over
        self._longest_first = longest_first
        self._last: list[tuple[bytes, int] | None] = [None] * num_replicas
        """The prompt that each replica took last, and the number of its shareable blocks."""
        self._in_order: deque[WaitingRow[PreparedRow]] = deque()
        """Waiting rows in the order of their arrival; rows taken meanwhile are dropped when they come to the front."""
        self._num_added = 0
        self.num_rows = 0
        self.num_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether rows should wait before they are added. A row that is added all the same is kept."""
        return self.num_rows >= self._max_rows or self.num_bytes >= self._max_bytes

    def add(self, row: PreparedRow) -> None:
        num_blocks = self._tree.num_shareable_blocks(row.prompt_ids) if self._shares_prefixes else 0
        rank = (-_length_class(row) if self._longest_first else 0, self._num_added)
        waiting = WaitingRow(row, row.prompt_ids, num_blocks, rank)
        self._tree.add(waiting)
        self._in_order.append(waiting)
        self._num_added += 1
        self.num_rows += 1
        self.num_bytes += row.num_bytes

    def take(self, replica: int = 0) -> PreparedRow | None:
        """Take out and return the row that a replica should be given next; None if there is none."""
        if not self.num_rows:
            return None
        waiting = self._choose(replica)
        if waiting.node is not None:
            waiting.node.replica = replica
        self._last[replica] = (waiting.prompt_ids, waiting.num_blocks) if waiting.num_blocks else None
        row = self._tree.remove(waiting)
        self.num_rows -= 1
        self.num_bytes -= row.num_bytes
        return row

    def _choose(self, replica: int) -> WaitingRow[PreparedRow]:
        in_order = self._in_order
        while in_order[0].item is None:
            in_order.popleft()
        oldest = in_order[0]
        # All rows before the oldest one are taken; the others that are taken have passed it over.
        num_taken = self._num_added - self.num_rows
        if num_taken - oldest.rank[1] >= self._max_passed_over:
            return oldest
        last = self._last[replica]
        node = self._tree.root if last is None else self._tree.deepest(*last)
        if isinstance(node, WaitingRow):
            return node
        return self._tree.best(node, replica=replica if len(self._last) > 1 else None, max_passed=_MAX_CANDIDATES)

    def check_integrity(self) -> None:
        """Assert that counts and indexes agree."""
        self._tree.check_integrity()
        waiting = [row.item for row in self._in_order if row.item is not None]
        assert self.num_rows == len(waiting) == self._tree.root.num_waiting
        assert self.num_bytes == sum(row.num_bytes for row in waiting)


def _length_class(row: PreparedRow) -> int:
    """Return the order of magnitude of the longest answer that a row may get, or what puts it in its turn."""
    asked, caller = row.sampling.max_tokens, row.place.caller
    if caller is not None and caller.keeps_order:
        return _MAX_LENGTH_CLASS
    return _MAX_LENGTH_CLASS if asked is None else min(asked.bit_length(), _MAX_LENGTH_CLASS - 1)
