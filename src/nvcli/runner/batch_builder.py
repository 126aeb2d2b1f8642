"""From a StepInput and the slot table to the step's ForwardBatch: which tokens, where they are, where their K/V go.

For steps with prompt slices; pure decode steps have a way of their own that a CUDA graph can hold (`decode_step.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nvcli.attention.backend import AttentionBackend
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.kv_cache import KVCache
from nvcli.messages import StepInput
from nvcli.runner.slot_table import SlotTable, unpack_ids
from nvcli.runner.uploader import Uploader


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A ForwardBatch and who of it samples."""

    forward: ForwardBatch
    sampling_slots: Tensor
    """[N] int64, slots of the requests that sample."""
    positions: Tensor
    """[N] int32, of the tokens to be sampled."""
    sampling_slots_host: tuple[int, ...]


def build_batch(
    step: StepInput, table: SlotTable, kv_cache: KVCache, backend: AttentionBackend, upload: Uploader
) -> Batch:
    """Advance the slot table by one step and describe its batch."""
    decode_slots, extend_slots = unpack_ids(step.decode_slots), unpack_ids(step.extend_slots)
    extend_lens = unpack_ids(step.extend_lens)
    num_decodes, num_seqs = len(decode_slots), len(decode_slots) + len(extend_slots)
    host_slots = np.concatenate([decode_slots, extend_slots])
    host_lens = np.ones(num_seqs, dtype=np.int64)
    host_lens[num_decodes:] = extend_lens
    host_starts = np.zeros(num_seqs + 1, dtype=np.int64)
    np.cumsum(host_lens, out=host_starts[1:])
    samples = np.ones(num_seqs, dtype=bool)
    samples[num_decodes:] = unpack_ids(step.extend_samples)
    host_sampling_rows = np.flatnonzero(samples)
    table.num_computed_host[host_slots] += host_lens
    seq_lens_host = table.num_computed_host[host_slots]

    slots32, lens, starts, row_of_token, offsets, new_ids, sampling_rows = upload(
        host_slots,
        host_lens,
        host_starts,
        np.repeat(np.arange(num_seqs), host_lens),
        np.arange(host_starts[-1]) - np.repeat(host_starts[:-1], host_lens),
        unpack_ids(step.token_ids),
        host_sampling_rows,
    )
    slots, rows = slots32.long(), row_of_token.long()
    first_positions = table.num_computed[slots]
    seq_lens = first_positions + lens
    token_slots = slots[rows]
    positions = first_positions[rows] + offsets
    long_positions = positions.long()
    table.token_ids[token_slots[num_decodes:], long_positions[num_decodes:]] = new_ids
    blocks = table.block_table[token_slots, long_positions // table.block_size].long()
    num_columns = -(-int(seq_lens_host.max()) // table.block_size)
    sampling = sampling_rows.long()
    forward = ForwardBatch(
        mode=step.mode,
        input_ids=table.token_ids[token_slots, long_positions],
        positions=positions,
        slot_mapping=(blocks * table.block_size + long_positions % table.block_size).unsqueeze(0),
        block_tables=table.block_table[:, :num_columns][slots],
        seq_lens=seq_lens,
        seq_lens_host=seq_lens_host,
        query_start_loc=starts,
        logits_rows=starts[1:].long()[sampling] - 1,
        num_decodes=num_decodes,
        extend_lens=extend_lens.tolist(),
        kv_cache=kv_cache,
        backend=backend,
    )
    table.num_computed[slots] = seq_lens
    return Batch(
        forward=forward,
        sampling_slots=slots[sampling],
        positions=seq_lens[sampling],
        sampling_slots_host=tuple(host_slots[host_sampling_rows].tolist()),
    )
