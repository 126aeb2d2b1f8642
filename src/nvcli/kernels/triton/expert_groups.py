"""A step's pairs of token and expert, sorted by expert on the GPU, and the work list of the products over them.

An *item* of the list is up to `row_tile` pairs of one expert: one tile of rows of a product. How many items there are
is known on the GPU only, so the list has room for the most that there may be, and the entries behind the last item have
no rows. Nothing has a size that depends on the routes: launches captured in a CUDA graph serve any of them.

Pairs are looked at in chunks. A program counts the pairs of each expert in all chunks, from which it knows where those
of its own chunk go, and the items of its own expert: no program waits for another. Of many pairs the counts of each
chunk are the work of a kernel of their own.

Where other ranks hold some of the experts, the pairs of those are in no item, and not in the order. The list has room
for them all the same, as all tokens may choose the experts of one rank.

Shapes: T tokens, k experts per token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

ITEM_FIELDS = 4
"""The int32 words of an entry: expert, first place in the order, number of pairs (0: nothing to do), number of items of
the list."""
_CHUNKS = (64, 512)
"""Pairs of a chunk: the first that is enough for all pairs, or the last. There are few, as each is compiled."""
_MANY_CHUNKS = 32
"""Chunks are counted by a kernel of their own where there are more."""
_SUMMED, _COMPARED = 8, 16
"""Chunks whose counts are added up at a time, and pairs that those of a chunk are compared with."""


class WorkList(NamedTuple):
    """The sorted pairs, and tiles of them."""

    order: Tensor
    """[T × k] int32: the pairs, those of the first expert first, in ascending order for each expert. What is behind the
    last one is undefined."""
    items: Tensor
    """[N, ITEM_FIELDS] int32."""
    row_tile: int
    """The most pairs of an item."""


@triton.jit
def _load_held(experts_ptr, pairs, num_pairs, FIRST_EXPERT: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Load the experts of pairs, as numbers of those that are held; NUM_EXPERTS: it is another, or there is no pair."""
    held = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=FIRST_EXPERT + NUM_EXPERTS) - FIRST_EXPERT
    return tl.where((held >= 0) & (held < NUM_EXPERTS), held, NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    experts_ptr,  # [num_pairs] int32
    counts_ptr,  # [chunks, BINS] int32, written
    num_pairs,
    FIRST_EXPERT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (chunk)."""
    await_kernel_before(DEPENDENT)
    pairs = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    counts = tl.histogram(_load_held(experts_ptr, pairs, num_pairs, FIRST_EXPERT, NUM_EXPERTS), BINS)
    tl.store(counts_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks", "num_entries"])
def _group_kernel(
    experts_ptr,  # [num_pairs] int32
    counts_ptr,  # [num_chunks, BINS] int32, with HAS_COUNTS
    order_ptr,  # [num_pairs] int32, written
    items_ptr,  # [num_entries, ITEM_FIELDS] int32, written
    num_pairs,
    num_chunks,
    num_entries,
    ROW_TILE: tl.constexpr,
    FIRST_EXPERT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,  # that are held here, from FIRST_EXPERT on
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    SUMMED: tl.constexpr,
    COMPARED: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (chunk and expert), where there are such ones. BINS is a power of two above NUM_EXPERTS."""
    await_kernel_before(DEPENDENT)
    program = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    if HAS_COUNTS:
        for start in range(0, num_chunks, SUMMED):
            chunks = start + tl.arange(0, SUMMED)
            counts_ptrs = counts_ptr + chunks[:, None] * BINS + bins[None, :]
            counts = tl.load(counts_ptrs, mask=(chunks < num_chunks)[:, None], other=0)
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where((chunks < program)[:, None], counts, 0), 0)
    else:
        for chunk in range(num_chunks):
            pairs = chunk * CHUNK + tl.arange(0, CHUNK)
            counts = tl.histogram(_load_held(experts_ptr, pairs, num_pairs, FIRST_EXPERT, NUM_EXPERTS), BINS)
            total += counts
            before += tl.where(chunk < program, counts, 0)
    first = tl.cumsum(total, 0) - total
    if program < num_chunks:
        pairs = program * CHUNK + tl.arange(0, CHUNK)
        held = _load_held(experts_ptr, pairs, num_pairs, FIRST_EXPERT, NUM_EXPERTS)
        places = tl.gather(first + before, held, 0)
        for start in range(0, CHUNK, COMPARED):
            others = program * CHUNK + start + tl.arange(0, COMPARED)
            experts = _load_held(experts_ptr, others, num_pairs, FIRST_EXPERT, NUM_EXPERTS)
            is_before = (held[:, None] == experts[None, :]) & (others[None, :] < pairs[:, None])
            places += tl.sum(is_before.to(tl.int32), 1)
        tl.store(order_ptr + places, pairs, mask=held < NUM_EXPERTS)
    tiles = tl.where(bins < NUM_EXPERTS, (total + (ROW_TILE - 1)) // ROW_TILE, 0)
    num_items = tl.sum(tiles, 0)
    fields = tl.arange(0, ITEM_FIELDS)
    if program < NUM_EXPERTS:
        is_mine = bins == program
        row = tl.sum(tl.where(is_mine, first, 0), 0)
        rest = tl.sum(tl.where(is_mine, total, 0), 0)
        entry = tl.sum(tl.where(bins < program, tiles, 0), 0)
        while rest > 0:
            rows = tl.minimum(rest, ROW_TILE)
            item = tl.where(fields == 0, program, tl.where(fields == 1, row, tl.where(fields == 2, rows, num_items)))
            tl.store(items_ptr + entry * ITEM_FIELDS + fields, item)
            entry += 1
            row += ROW_TILE
            rest -= ROW_TILE
    for index in range(num_items + program, num_entries, tl.num_programs(0)):
        tl.store(items_ptr + index * ITEM_FIELDS + fields, tl.where(fields == 3, num_items, 0))


def group_by_expert(experts: Tensor, num_experts: int, row_tile: int, *, first_expert: int = 0) -> WorkList:
    """Sort the pairs by expert and list the tiles. experts: [T, k] int32, contiguous, a token's k all different.

    `num_experts` are held here, from `first_expert` on. Items number those from 0.
    """
    num_pairs = experts.numel()
    num_entries = min(num_pairs, num_experts + num_pairs // row_tile)
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    items = torch.empty(num_entries, ITEM_FIELDS, dtype=torch.int32, device=experts.device)
    chunk = next((size for size in _CHUNKS if num_pairs <= size), _CHUNKS[-1])
    num_chunks, bins = ceil_div(num_pairs, chunk), next_power_of_2(num_experts + 1)
    counts, options = order, dependent(experts.device)
    if num_chunks > _MANY_CHUNKS:
        counts = torch.empty(num_chunks, bins, dtype=torch.int32, device=experts.device)
        _count_kernel[(num_chunks,)](
            experts,
            counts,
            num_pairs,
            FIRST_EXPERT=first_expert,
            NUM_EXPERTS=num_experts,
            BINS=bins,
            CHUNK=chunk,
            num_warps=4,
            **options,
        )
    _group_kernel[(max(num_chunks, num_experts),)](
        experts,
        counts,
        order,
        items,
        num_pairs,
        num_chunks,
        num_entries,
        ROW_TILE=row_tile,
        FIRST_EXPERT=first_expert,
        NUM_EXPERTS=num_experts,
        BINS=bins,
        CHUNK=chunk,
        HAS_COUNTS=counts is not order,
        SUMMED=_SUMMED,
        COMPARED=_COMPARED,
        ITEM_FIELDS=ITEM_FIELDS,
        num_warps=4 if num_chunks == 1 else 8,
        **options,
    )
    return WorkList(order, items, row_tile)
