"""Attention of the `torch` backend where requests share keys: the plan of a step, and the attention over shared keys
for all rows at once. Decode rows share segments, and prefill chunks share prefixes.

It is the reference for other backends: the softmax over all keys of a row, merged from the softmax over its own keys
and those over shared keys.

Shapes: n rows of a segment, D head_dim, KV heads of this rank, G = num_heads / KV query heads for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from nvcli.attention import written_softmax
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import AttentionSpec, first_seen
from nvcli.kernels.whole_numbers import ceil_div

_MOST_ROWS = 256
"""Tokens of chunks attended at once; bounds the memory of the scores."""


@dataclass(frozen=True, slots=True)
class SharedRead:
    """A run of blocks, and the rows of the step (decode rows, or tokens of chunks) that see any of it."""

    rows: Tensor
    """[n] int64."""
    block_ids: Tensor
    """[blocks] int64, from the first one on that any of the rows sees."""
    mask: Tensor | None
    """[n, 1, keys], 0 or -inf; None: every row sees all keys of the blocks."""

    def attend(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Attend the rows to the blocks' keys. q: [rows of the step, KV, G, D]; k, v: [keys, KV, D] → [n, KV, G, D] and
        the logs of the sums of weights [n, KV, G], both float32."""
        shape = q.shape[1], len(self.rows), q.shape[2]
        queries = q[self.rows].transpose(0, 1).flatten(1, 2)  # [KV, n × G, D]
        mask = None if self.mask is None else self.mask.expand(-1, q.shape[2], -1).flatten(0, 1)
        out, log_sum = written_softmax.attend_part(
            spec, queries, k.transpose(0, 1), v.transpose(0, 1), mask=mask, sinks=None
        )
        return out.view(*shape, -1).transpose(0, 1), log_sum.view(shape).transpose(0, 1)


def plan_shared_reads(
    batch: ForwardBatch, kv_group: int, window: int | None, block_size: int, lens: list[int]
) -> tuple[list[SharedRead], list[int]]:
    """Lay out the segment reads of decode rows with these lengths; also return each row's first own key."""
    assert batch.segments is not None
    entries = batch.segments.segments[kv_group].tolist()
    slots = batch.slots[: len(lens)]
    numbers = batch.segments.slot_segments[kv_group, slots].tolist()
    readers: dict[int, list[int]] = {}
    own_begins = [0] * len(lens)
    for row, (number, length) in enumerate(zip(numbers, lens, strict=True)):
        segment, seen_from = number, first_seen(length - 1, window)
        while segment and entries[segment][1] > seen_from:
            readers.setdefault(segment, []).append(row)
            own_begins[row] = max(own_begins[row], entries[segment][1])
            segment = entries[segment][2]
    reads = []
    for segment, rows in readers.items():
        begin, end, _ = entries[segment]
        # The shortest row sees every key that any of them sees.
        source = min(rows, key=lens.__getitem__)
        first_block = max(begin, first_seen(lens[source] - 1, window)) // block_size
        blocks = batch.block_tables[kv_group, slots[source], first_block : end // block_size].long()
        mask = None
        if window is not None:
            key = torch.arange(first_block * block_size, end, device=slots.device)
            seen = torch.tensor([first_seen(lens[row] - 1, window) for row in rows], device=slots.device)
            mask = torch.zeros(len(rows), len(key), device=slots.device)
            mask = mask.masked_fill_(key < seen.unsqueeze(1), float("-inf")).unsqueeze(1)
        reads.append(SharedRead(torch.tensor(rows, device=slots.device), blocks, mask))
    return reads, own_begins


def plan_prefix_reads(
    batch: ForwardBatch, kv_group: int, block_size: int, counts: list[int], lens: list[int]
) -> list[SharedRead]:
    """Lay out the reads of chunks that share prefixes: first the prefixes, one read for some tokens of a group, then
    the rest of each chunk's keys. `counts` and `lens`: tokens and keys of each chunk; tokens are counted from the
    first chunk's."""
    assert batch.prefixes is not None
    first_row, device = batch.num_decoded_rows, batch.slots.device
    ends = batch.prefixes.ends[first_row:].tolist()
    group_ends = [row - first_row for row in batch.prefixes.group_ends[first_row:].tolist()]
    starts = [0, *accumulate(counts)]
    tables = batch.block_tables[kv_group, batch.slots[first_row:]]
    prefixes, rests = [], []
    for chunk, (end, group_end) in enumerate(zip(ends, group_ends, strict=True)):
        for start in range(starts[chunk], starts[max(group_end, chunk)], _MOST_ROWS):
            rows = torch.arange(start, min(start + _MOST_ROWS, starts[group_end]), device=device)
            prefixes.append(SharedRead(rows, tables[chunk, : end // block_size].long(), None))
        for start in range(starts[chunk], starts[chunk + 1] if end else 0, _MOST_ROWS):
            rows = torch.arange(start, min(start + _MOST_ROWS, starts[chunk + 1]), device=device)
            positions = rows - starts[chunk + 1] + lens[chunk]
            blocks = tables[chunk, end // block_size : ceil_div(lens[chunk], block_size)].long()
            key = torch.arange(end, end + len(blocks) * block_size, device=device)
            mask = torch.zeros(len(rows), len(key), device=device)
            mask = mask.masked_fill_(key > positions.unsqueeze(1), float("-inf")).unsqueeze(1)
            rests.append(SharedRead(rows, blocks, mask))
    return prefixes + rests
