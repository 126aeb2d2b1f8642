"""Chooses which of the rows read ahead goes to a replica next.

- Rows that begin alike go one after the other to one replica, so that their prefix is computed once and need not
  outlive others in the KV cache. The longest common prefix goes on first.
- Rows of a LoRA adapter share nothing with those of others, and each adapter in a step costs time. So an adapter counts
  as a block before the prompt, and its rows go one after the other, unless rows keep their order.
- Otherwise rows with a large `max_tokens` go first, so that a run does not end with a few long answers. Lengths are
  compared by their order of magnitude; a row without `max_tokens` may become the longest, and so may one whose caller
  wants answers in order. Equals keep their order.
- Rows of a LoRA adapter that is merged into the weights in its turn are a *group*: a replica gets no others while such
  rows wait, then those of the group with the most rows, if it can be one that no other replica has taken up. All other
  rows are one more group.
- No row is passed over by more than `max_passed_over` later ones.

Which rows begin alike is known by a radix tree over the prompts' whole KV blocks, because the KV cache shares whole
blocks. A prompt that ends with a block does not share that block: its last token is always computed.

Rows that are there are given out at once; nothing waits for the window to fill. A row's answer does not depend on when
it is computed, so a plan changes the speed of a run and the order of its output, and nothing else. The planner knows no
engine, clock or file.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection

from nvcli.core.messages import TOKEN_BYTES
from nvcli.engine.block_manager import num_equal_blocks
from nvcli.job.text.prepare import PreparedRow

_MAX_LENGTH_CLASS = 64
"""Length class of rows without `max_tokens`."""
_MAX_CANDIDATES = 8
"""Rows with prefixes of other replicas that a replica skips before it takes one of them."""


class Planner:
    """Rows that wait for a replica. Not thread-safe."""

    def __init__(
        self,
        *,
        block_size: int | None,
        max_rows: int,
        max_bytes: int,
        max_passed_over: int,
        num_replicas: int = 1,
        longest_first: bool = True,
        merged_adapters: Collection[int] = (),
    ) -> None:
        """`block_size` is the number of tokens in a KV block; None: prefixes do not matter.

        `max_rows` and `max_bytes` (by `PreparedRow.num_bytes`) say when the planner is full; `max_passed_over` is the
        most later rows that may go before a row. `merged_adapters` have groups of their own.
        """
        assert max_passed_over >= 0
        self._merged_adapters = frozenset(merged_adapters)
        self._trees = {group: PrefixTree(block_size or 1) for group in (0, *merged_adapters)}
        """The rows of each group; 0: of no merged adapter."""
        self._groups: list[int | None] = [None] * num_replicas
        """The group that each replica last took a row of; None: it has taken none."""
        self._shares_prefixes = block_size is not None
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._max_passed_over = max_passed_over
        self._longest_first = longest_first
        self._last: list[tuple[bytes, int] | None] = [None] * num_replicas
        """Last prompt of each replica, and the number of its shareable blocks."""
        self._in_order: deque[WaitingRow] = deque()
        """Waiting rows in order of arrival; taken ones are dropped when they come to the front."""
        self._num_added = 0
        self.num_rows = 0
        self.num_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether no more rows should be added for now. A row added anyway is kept."""
        return self.num_rows >= self._max_rows or self.num_bytes >= self._max_bytes

    def add(self, row: PreparedRow) -> None:
        tree = self._tree_of(row)
        has_mark = self._longest_first and row.adapter > 0
        ids = tree.mark(row.adapter) + row.prompt_ids if has_mark else row.prompt_ids
        num_blocks = tree.num_shareable_blocks(ids) if self._shares_prefixes else int(has_mark)
        rank = (-_length_class(row) if self._longest_first else 0, self._num_added)
        waiting = WaitingRow(row, ids, num_blocks, rank)
        tree.add(waiting)
        self._in_order.append(waiting)
        self._num_added += 1
        self.num_rows += 1
        self.num_bytes += row.num_bytes

    def take(self, replica: int = 0) -> PreparedRow | None:
        """Remove and return the next row for a replica; None if there is none."""
        if not self.num_rows:
            return None
        waiting = self._choose(replica)
        if waiting.node is not None:
            waiting.node.replica = replica
        self._last[replica] = (waiting.prompt_ids, waiting.num_blocks) if waiting.num_blocks else None
        assert waiting.item is not None
        group = self._group_of(waiting.item)
        self._groups[replica] = group
        row = self._trees[group].remove(waiting)
        self.num_rows -= 1
        self.num_bytes -= row.num_bytes
        return row

    def _choose(self, replica: int) -> WaitingRow:
        in_order = self._in_order
        while in_order[0].item is None:
            in_order.popleft()
        oldest = in_order[0]
        # All rows before the oldest one are taken; the others that are taken have passed it over.
        num_taken = self._num_added - self.num_rows
        if num_taken - oldest.rank[1] >= self._max_passed_over:
            return oldest
        group, last = self._choose_group(replica), self._last[replica]
        tree = self._trees[group]
        node = tree.root if last is None or group != self._groups[replica] else tree.deepest(*last)
        if isinstance(node, WaitingRow):
            return node
        return tree.best(node, replica=replica if len(self._last) > 1 else None, max_passed=_MAX_CANDIDATES)

    def _choose_group(self, replica: int) -> int:
        """Return the group of the next row for a replica: that of the one before while rows of it wait."""
        group = self._groups[replica]
        if group is not None and self._trees[group].root.num_waiting:
            return group
        others = {taken for number, taken in enumerate(self._groups) if number != replica}
        waiting = {group: tree.root.num_waiting for group, tree in self._trees.items() if tree.root.num_waiting}
        return max(waiting, key=lambda group: (group not in others, waiting[group]))

    def _group_of(self, row: PreparedRow) -> int:
        return row.adapter if row.adapter in self._merged_adapters else 0

    def _tree_of(self, row: PreparedRow) -> PrefixTree:
        return self._trees[self._group_of(row)]

    def check_integrity(self) -> None:
        """Assert that counts and indexes agree."""
        for tree in self._trees.values():
            tree.check_integrity()
        waiting = [row.item for row in self._in_order if row.item is not None]
        assert self.num_rows == len(waiting) == sum(tree.root.num_waiting for tree in self._trees.values())
        assert self.num_bytes == sum(row.num_bytes for row in waiting)


def _length_class(row: PreparedRow) -> int:
    """Return the order of magnitude of a row's longest possible answer, or the class that keeps it in order."""
    asked, caller = row.sampling.max_tokens, row.context.caller
    if caller is not None and caller.keeps_order:
        return _MAX_LENGTH_CLASS
    return _MAX_LENGTH_CLASS if asked is None else min(asked.bit_length(), _MAX_LENGTH_CLASS - 1)


Rank = tuple[int, int]
"""Order among rows that begin alike: the smallest rank goes first. Ranks are unique in a tree."""

_MAX_STALE = 64
"""Entries of taken rows that a heap may hold, beyond twice the waiting ones."""


class WaitingRow:
    """A row waiting in the tree."""

    __slots__ = ("item", "node", "num_blocks", "prompt_ids", "rank")

    def __init__(self, item: PreparedRow, prompt_ids: bytes, num_blocks: int, rank: Rank) -> None:
        self.item: PreparedRow | None = item
        """The row; None once it is taken, so that stale entries do not keep it in memory."""
        self.prompt_ids = prompt_ids
        """The prompt's token ids, packed as int32, after the mark of its adapter if it has one."""
        self.num_blocks = num_blocks
        """Leading KV blocks that the row can share; 0 if prefixes do not matter."""
        self.rank = rank
        self.node: Node | None = None
        """The deepest node that holds the row."""


class Node:
    """A prefix of `num_blocks` whole blocks shared by at least two rows, and every waiting row below it."""

    __slots__ = ("children", "heap", "num_blocks", "num_waiting", "parent", "prefix_ids", "replica")

    def __init__(self, prefix_ids: bytes, num_blocks: int, parent: Node | None) -> None:
        self.prefix_ids = prefix_ids
        self.num_blocks = num_blocks
        self.parent = parent
        self.children: dict[bytes, Node | WaitingRow] = {}
        """Nodes and rows below, by the block after the prefix."""
        self.heap: list[tuple[Rank, WaitingRow]] = []
        """Heap of all rows below; taken ones are dropped when they come up or become many."""
        self.num_waiting = 0
        self.replica: int | None = None
        """The replica that last took a row from here."""

    def push(self, row: WaitingRow) -> None:
        heapq.heappush(self.heap, (row.rank, row))
        self.num_waiting += 1

    def drop_taken(self) -> None:
        """Drop taken rows until the first one of the heap is a waiting row."""
        heap = self.heap
        if len(heap) > 2 * self.num_waiting + _MAX_STALE:
            heap[:] = [entry for entry in heap if entry[1].item is not None]
            heapq.heapify(heap)
        while heap and heap[0][1].item is None:
            heapq.heappop(heap)


class PrefixTree:
    """A radix tree of waiting rows. `deepest` and `best` search it."""

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self.root: Node = Node(b"", 0, None)

    def mark(self, adapter: int) -> bytes:
        """Return a block that stands for a LoRA adapter, with negative ids, which no prompt has."""
        return (-adapter).to_bytes(TOKEN_BYTES, "little", signed=True) * (self._block_bytes // TOKEN_BYTES)

    def num_shareable_blocks(self, prompt_ids: bytes) -> int:
        return (len(prompt_ids) // TOKEN_BYTES - 1) * TOKEN_BYTES // self._block_bytes

    def add(self, row: WaitingRow) -> None:
        node = self.root
        while True:
            node.push(row)
            row.node = node
            if row.num_blocks == node.num_blocks:
                return
            key = self._block(row.prompt_ids, node.num_blocks)
            child = node.children.get(key)
            if child is None:
                node.children[key] = row
                return
            node = self._join(node, key, child, row)

    def remove(self, row: WaitingRow) -> PreparedRow:
        """Remove a waiting row."""
        item, row.item = row.item, None
        assert item is not None
        node = row.node
        assert node is not None
        if row.num_blocks > node.num_blocks:
            del node.children[self._block(row.prompt_ids, node.num_blocks)]
        while node is not None:
            node.num_waiting -= 1
            if node.num_waiting == 0 and node.parent is not None:
                del node.parent.children[self._block(node.prefix_ids, node.parent.num_blocks)]
            node = node.parent
        return item

    def deepest(self, prompt_ids: bytes, num_blocks: int) -> Node | WaitingRow:
        """Find the rows that share the most blocks with the first `num_blocks` of a prompt; the root if none do."""
        node = self.root
        while node.num_blocks < num_blocks:
            child = node.children.get(self._block(prompt_ids, node.num_blocks))
            if child is None:
                break
            if isinstance(child, WaitingRow) or not prompt_ids.startswith(child.prefix_ids):
                return child
            node = child
        return node

    def best(self, node: Node, *, replica: int | None = None, max_passed: int = 0) -> WaitingRow:
        """Return the row of the smallest rank below a node that is not empty.

        Where `replica` is given, up to `max_passed` rows are passed over whose prefix another replica has taken up.
        """
        node.drop_taken()
        row = node.heap[0][1]
        if replica is None or not _belongs_elsewhere(row, node, replica):
            return row
        passed: list[tuple[Rank, WaitingRow]] = []
        while len(passed) < max_passed and node.heap:
            passed.append(heapq.heappop(node.heap))
            node.drop_taken()
            if node.heap and not _belongs_elsewhere(node.heap[0][1], node, replica):
                row = node.heap[0][1]
                break
        for entry in passed:
            heapq.heappush(node.heap, entry)
        return row

    def _join(self, node: Node, key: bytes, child: Node | WaitingRow, row: WaitingRow) -> Node:
        """Return the node for the common prefix of `child` and `row` below `node`, creating it if needed."""
        other_ids = child.prompt_ids if isinstance(child, WaitingRow) else child.prefix_ids
        most = min(child.num_blocks, row.num_blocks)
        shared = num_equal_blocks(other_ids, row.prompt_ids, self._block_bytes, node.num_blocks + 1, most)
        if isinstance(child, Node) and shared == child.num_blocks:
            return child
        joint: Node = Node(row.prompt_ids[: shared * self._block_bytes], shared, node)
        node.children[key] = joint
        if child.num_blocks > shared:
            joint.children[self._block(other_ids, shared)] = child
        if isinstance(child, WaitingRow):
            joint.push(child)
            child.node = joint
        else:
            child.parent = joint
            child.drop_taken()
            joint.heap = child.heap.copy()
            joint.num_waiting = child.num_waiting
            joint.replica = child.replica
        return joint

    def _block(self, ids: bytes, number: int) -> bytes:
        return ids[number * self._block_bytes : (number + 1) * self._block_bytes]

    def check_integrity(self) -> None:
        """Assert that nodes, heaps and rows agree."""
        self._check(self.root)

    def _check(self, node: Node) -> set[int]:
        waiting = {id(row): row for _, row in node.heap if row.item is not None}
        assert len(waiting) == node.num_waiting
        below: set[int] = set()
        for key, child in node.children.items():
            ids = child.prompt_ids if isinstance(child, WaitingRow) else child.prefix_ids
            assert ids.startswith(node.prefix_ids)
            assert self._block(ids, node.num_blocks) == key
            assert child.num_blocks > node.num_blocks
            if isinstance(child, WaitingRow):
                assert child.item is not None
                assert child.node is node
                below.add(id(child))
            else:
                assert child.parent is node
                assert child.num_waiting > 0
                assert len(child.prefix_ids) == child.num_blocks * self._block_bytes
                below |= self._check(child)
        assert below <= waiting.keys()
        for row in waiting.values():
            assert row.prompt_ids.startswith(node.prefix_ids)
            if id(row) not in below:
                assert row.node is node
                assert row.num_blocks == node.num_blocks
        return set(waiting)


def _belongs_elsewhere(row: WaitingRow, node: Node, replica: int) -> bool:
    """Tell whether a row below `node` begins with a longer prefix that another replica has taken up."""
    return row.node is not node and row.node is not None and row.node.replica not in (None, replica)
