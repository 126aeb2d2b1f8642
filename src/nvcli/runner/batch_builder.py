"""From a StepInput and the slot table to the step's ForwardBatch: which tokens, where they are, where their K/V go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.backend import AttentionBackend
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.kv_cache import KVCache
from nvcli.messages import StepInput
from nvcli.runner.slot_table import SlotTable, unpack_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A ForwardBatch and what the runner does with its outcome."""

    forward: ForwardBatch
    slots: Tensor
    """[S] int64, the slot of each request."""
    query_lens: Tensor
    """[S] int32, tokens computed for each."""
    sampling_rows: Tensor
    """[N] int64, which of the S requests sample."""
    sampling_slots: tuple[int, ...]
    """Their slots, on the host."""


def build_batch(step: StepInput, table: SlotTable, kv_cache: KVCache, backend: AttentionBackend) -> Batch:
    """Advance the slot table by one step and describe its batch."""
    device, block_size = table.device, table.block_size
    decode_slots, extend_slots = unpack_ids(step.decode_slots), unpack_ids(step.extend_slots)
    extend_lens = unpack_ids(step.extend_lens)
    num_decodes, num_seqs = len(decode_slots), len(decode_slots) + len(extend_slots)
    host_slots = np.concatenate([decode_slots, extend_slots]).astype(np.int64)
    host_lens = np.ones(num_seqs, dtype=np.int64)
    host_lens[num_decodes:] = extend_lens
    host_starts = np.zeros(num_seqs + 1, dtype=np.int64)
    np.cumsum(host_lens, out=host_starts[1:])
    samples = np.ones(num_seqs, dtype=bool)
    samples[num_decodes:] = unpack_ids(step.extend_samples)
    host_sampling_rows = np.flatnonzero(samples)
    table.num_computed_host[host_slots] += host_lens
    max_seq_len = int(table.num_computed_host[host_slots].max())

    def to_device(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype, non_blocking=True)

    slots = to_device(host_slots, torch.int64)
    query_lens = to_device(host_lens, torch.int32)
    first_positions = table.num_computed[slots]
    seq_lens = first_positions + query_lens
    if num_seqs == num_decodes:
        token_slots, positions = slots, first_positions
    else:
        row_of_token = to_device(np.repeat(np.arange(num_seqs), host_lens), torch.int64)
        offset = np.arange(host_starts[-1]) - np.repeat(host_starts[:-1], host_lens)
        token_slots = slots[row_of_token]
        positions = first_positions[row_of_token] + to_device(offset, torch.int32)
        new_ids = to_device(unpack_ids(step.token_ids).copy(), torch.int32)
        table.token_ids[token_slots[num_decodes:], positions[num_decodes:].long()] = new_ids
    long_positions = positions.long()
    blocks = table.block_table[token_slots, long_positions // block_size].long()
    num_columns = -(-max_seq_len // block_size)
    forward = ForwardBatch(
        mode=step.mode,
        input_ids=table.token_ids[token_slots, long_positions],
        positions=positions,
        slot_mapping=blocks * block_size + long_positions % block_size,
        block_tables=table.block_table[:, :num_columns][slots],
        seq_lens=seq_lens,
        query_start_loc=to_device(host_starts, torch.int32),
        logits_rows=to_device(host_starts[1:][host_sampling_rows] - 1, torch.int64),
        num_decodes=num_decodes,
        extend_lens=extend_lens.tolist(),
        kv_cache=kv_cache,
        backend=backend,
    )
    table.num_computed[slots] = seq_lens
    return Batch(
        forward=forward,
        slots=slots,
        query_lens=query_lens,
        sampling_rows=to_device(host_sampling_rows, torch.int64),
        sampling_slots=tuple(host_slots[host_sampling_rows].tolist()),
    )
