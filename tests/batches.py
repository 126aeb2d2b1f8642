"""Makes ForwardBatches by hand, as the runner would: requests, blocks, and steps of any composition."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.backend import AttentionBackend
from nvcli.attention.forward_batch import BatchShape, ForwardBatch
from nvcli.attention.kv_cache import NULL_BLOCK, KVCache


@dataclass
class Blocks:
    """Hands out block ids in random order, so that no test passes by blocks lying side by side."""

    num_blocks: int
    spans: dict[int, int] = field(default_factory=dict)
    """The columns of a block by KV group, where they are more than one."""
    free: list[int] = field(init=False)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.free = list(range(1, self.num_blocks))
        self.rng.shuffle(self.free)

    def grow(self, table: list[int], num_tokens: int, block_size: int) -> None:
        while len(table) * block_size < num_tokens:
            table.append(self.free.pop())


@dataclass
class RequestState:
    length: int = 0
    """Tokens in the cache."""
    tables: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Block ids by KV group."""


def make_batch(
    work: list[tuple[RequestState, list[int]]],
    kv_cache: KVCache,
    backend: AttentionBackend,
    blocks: Blocks,
    *,
    shape: BatchShape | None = None,
    table_shape: tuple[int, int] | None = None,
) -> ForwardBatch:
    """The batch that computes the given tokens of each request, and advances them. Decode rows must come first.

    shape: what the batch is padded to; without it, it is as large as the work, and rows of one token that have a past
    are its decode rows. table_shape: slots and columns of the block tables, as they are needed without it. Slots are
    dealt in random order, and table entries that belong to nobody hold some block's id.
    """
    block_size, num_groups = kv_cache.spec.block_size, kv_cache.spec.num_groups
    shape = shape or shape_of(work)
    lens = [len(tokens) for _, tokens in work]
    num_decodes = _count_decodes(work, shape)
    for request, tokens in work:
        request.length += len(tokens)
        for group in range(num_groups):
            blocks.grow(request.tables[group], request.length, block_size * blocks.spans.get(group, 1))
    most_blocks = max((len(request.tables[0]) for request, _ in work), default=1)
    num_slots, width = table_shape or (len(work) + 3, most_blocks + 2)
    # The last slot is the padding slot.
    slots = blocks.rng.sample(range(num_slots - 1), len(work))
    tables = blocks.rng.choices(range(1, blocks.num_blocks), k=num_groups * num_slots * width)
    block_tables = np.array(tables, dtype=np.int32).reshape(num_groups, num_slots, width)
    block_tables[:, -1] = NULL_BLOCK
    slot_mapping: list[list[int]] = []
    for group in range(num_groups):
        places = []
        for (request, tokens), slot in zip(work, slots, strict=True):
            table = request.tables[group]
            block_tables[group, slot, : len(table)] = table
            positions = range(request.length - len(tokens), request.length)
            is_read = blocks.spans.get(group, 1) == 1
            places.append([table[i // block_size] * block_size + i % block_size if is_read else -1 for i in positions])
        slot_mapping.append(_pad_tokens(places, num_decodes, shape))

    def rows(decodes: list[int], padding_decode: int, chunks: list[int], padding_chunk: int) -> list[int]:
        padding_decodes = [padding_decode] * (shape.decode_rows - len(decodes))
        return [*decodes, *padding_decodes, *chunks, *[padding_chunk] * (shape.prefill_rows - len(chunks))]

    seq_lens = [request.length for request, _ in work]
    padded_lens = rows(lens[:num_decodes], shape.tokens_per_row, lens[num_decodes:], 0)
    padded_seq_lens = rows(seq_lens[:num_decodes], 1, seq_lens[num_decodes:], 0)
    ids = [tokens for _, tokens in work]
    past = [list(range(request.length - len(tokens), request.length)) for request, tokens in work]
    is_token = _pad_tokens([[1] * count for count in lens], num_decodes, shape)
    device = kv_cache.data.device

    def on_device(values: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    batch = ForwardBatch(
        shape=shape,
        input_ids=on_device(_pad_tokens(ids, num_decodes, shape), torch.int32),
        positions=on_device(_pad_tokens(past, num_decodes, shape), torch.int32),
        slot_mapping=on_device(slot_mapping, torch.int64),
        slots=on_device(rows(slots[:num_decodes], num_slots - 1, slots[num_decodes:], num_slots - 1), torch.int64),
        block_tables=torch.from_numpy(block_tables).to(device),
        seq_lens=on_device(padded_seq_lens, torch.int32),
        query_start_loc=on_device(list(accumulate(padded_lens, initial=0)), torch.int32),
        logits_rows=on_device([row for row, is_one in enumerate(is_token) if is_one], torch.int64),
        num_tokens_host=np.array(padded_lens, dtype=np.int64),
        seq_lens_host=np.array(padded_seq_lens, dtype=np.int64),
        kv_cache=kv_cache,
        backend=backend,
    )
    assert batch.slot_mapping.shape == (num_groups, shape.num_tokens)
    assert batch.slots.shape == (shape.num_rows,)
    if work:
        backend.plan(batch)
        backend.plan_on_device(batch)
    return batch


def shape_of(work: list[tuple[RequestState, list[int]]]) -> BatchShape:
    """The shape of the work without padding: leading rows of one token that have a past are decode rows."""
    num_decodes = 0
    while num_decodes < len(work) and len(work[num_decodes][1]) == 1 and work[num_decodes][0].length > 0:
        num_decodes += 1
    return BatchShape(
        decode_rows=num_decodes,
        prefill_rows=len(work) - num_decodes,
        prefill_tokens=sum(len(tokens) for _, tokens in work[num_decodes:]),
    )


def _count_decodes(work: list[tuple[RequestState, list[int]]], shape: BatchShape) -> int:
    """How many leading rows of the work take decode rows of the shape."""
    num_decodes = 0
    while num_decodes < min(len(work), shape.decode_rows) and len(work[num_decodes][1]) == shape.tokens_per_row:
        num_decodes += 1
    return num_decodes


def _pad_tokens(tokens: list[list[int]], num_decodes: int, shape: BatchShape) -> list[int]:
    """The rows' values one behind the other, with zeros for padding rows and behind the last chunk."""
    decodes = [value for row in tokens[:num_decodes] for value in row]
    chunks = [value for row in tokens[num_decodes:] for value in row]
    assert len(chunks) <= shape.prefill_tokens
    decodes += [0] * (shape.decode_tokens - len(decodes))
    return [*decodes, *chunks, *[0] * (shape.prefill_tokens - len(chunks))]
