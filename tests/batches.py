"""Makes ForwardBatches by hand, as the runner would: requests, blocks, and steps of any composition."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from nvcli.attention.backend import AttentionBackend
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.kv_cache import KVCache
from nvcli.messages import ForwardMode


@dataclass
class Blocks:
    """Hands out block ids in random order, so that no test passes by blocks lying side by side."""

    num_blocks: int
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.num_blocks))
        random.Random(0).shuffle(self.free)

    def grow(self, table: list[int], num_tokens: int, block_size: int) -> None:
        while len(table) * block_size < num_tokens:
            table.append(self.free.pop())


@dataclass
class RequestState:
    length: int = 0
    """Tokens in the cache."""
    table: list[int] = field(default_factory=list)


def make_batch(
    work: list[tuple[RequestState, list[int]]], kv_cache: KVCache, backend: AttentionBackend, blocks: Blocks
) -> ForwardBatch:
    """The batch that computes the given tokens of each request, and advances them. Decode rows must come first."""
    block_size = kv_cache.spec.block_size
    num_decodes = 0
    while num_decodes < len(work) and len(work[num_decodes][1]) == 1 and work[num_decodes][0].length > 0:
        num_decodes += 1
    ids, positions, slots, starts = [], [], [], [0]
    for request, tokens in work:
        end = request.length + len(tokens)
        blocks.grow(request.table, end, block_size)
        for position in range(request.length, end):
            positions.append(position)
            slots.append(request.table[position // block_size] * block_size + position % block_size)
        ids += tokens
        starts.append(len(ids))
        request.length = end
    width = max((len(request.table) for request, _ in work), default=1)
    tables = [request.table + [0] * (width - len(request.table)) for request, _ in work]
    mode = ForwardMode.MIXED if num_decodes else ForwardMode.EXTEND
    if num_decodes == len(work):
        mode = ForwardMode.DECODE if work else ForwardMode.IDLE
    device = kv_cache.data.device
    batch = ForwardBatch(
        mode=mode,
        input_ids=torch.tensor(ids, dtype=torch.int32, device=device),
        positions=torch.tensor(positions, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device).unsqueeze(0),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device).view(len(work), width),
        seq_lens=torch.tensor([request.length for request, _ in work], dtype=torch.int32, device=device),
        seq_lens_host=np.array([request.length for request, _ in work], dtype=np.int64),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        logits_rows=torch.arange(len(ids), device=device),
        num_decodes=num_decodes,
        extend_lens=[len(tokens) for _, tokens in work[num_decodes:]],
        kv_cache=kv_cache,
        backend=backend,
    )
    backend.plan(batch)
    backend.plan_on_device(batch)
    return batch
