"""The blocks that are cleared before a step reads them, where the attention backend multiplies what lies after a row's
last key by 0 (`AttentionBackend.reads_behind_rows`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nvcli.core.messages import StepInput
from nvcli.kernels.key_copies import COPY_FIELDS
from nvcli.worker.runner.slot_table import unpack_ids


def partly_filled_blocks(
    step: StepInput, block_size: int, state_groups: Sequence[int] = ()
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return blocks that a step gave to slots and that may be read before they are full: the last of each run of
    columns, and all blocks of decode rows with drafts, which may not come so far. This leaves out blocks with keys that
    are there, unless they are copied afterwards, and those of `state_groups`, the KV groups whose states are read as
    they were written."""
    groups, slots, columns = map(unpack_ids, (step.block_groups, step.block_slots, step.block_columns))
    is_last = np.ones(len(slots), dtype=np.bool_)
    is_last[:-1] = (groups[1:] != groups[:-1]) | (slots[1:] != slots[:-1]) | (columns[1:] != columns[:-1] + 1)
    if step.row_limits:
        is_last |= np.isin(slots, unpack_ids(step.slots)[: step.num_decodes])
    if state_groups:
        is_last &= ~np.isin(groups, state_groups)
    blocks: np.ndarray[tuple[int], np.dtype[np.int32]] = unpack_ids(step.block_ids)
    num_there = {new.slot: new.num_cached_tokens for new in step.new_slots}
    if any(num_there.values()):
        copied = unpack_ids(step.key_copies).reshape(-1, 1 + COPY_FIELDS)[:, 2]
        ends = np.array([num_there.get(slot, 0) for slot in slots.tolist()])
        is_last &= (columns * block_size >= ends) | np.isin(blocks, copied)
    return blocks[is_last]
