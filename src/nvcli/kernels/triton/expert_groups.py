"""A step's pairs of token and expert, sorted by expert on the GPU, and the work list of the products over them.

An *item* of the list is up to `row_tile` pairs of one expert: one tile of rows of a product. How many items an expert
has is known on the GPU only, so the list has room for the most that there may be, and entries without rows are passed
over. Nothing has a size that depends on the routes: launches captured in a CUDA graph serve any of them.

A program looks at all pairs, and writes those of its own expert. Where it writes follows from how many pairs have lower
experts: no program waits for another. Expert e's items begin at entry e + p // row_tile, with p the number of pairs
before it, which leaves room for an incomplete item of every expert. With few tokens, whose pairs are fewer than the
experts, the entries belong to pairs instead: the first pair of an expert has the item, the others have none.

Many pairs are looked at in chunks: one kernel counts the pairs of each expert in each chunk, and then a program adds up
these counts, and writes the pairs of one chunk and the items of one expert.

Where other ranks hold some of the experts, the pairs of those are in no item, and not in the order. The list has room
for them all the same, as all tokens may choose the experts of one rank.

Shapes: T tokens, k experts per token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.triton.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

ITEM_FIELDS = 4
"""The int32 words of an entry: expert, first place in the order, number of pairs (0: nothing to do), unused."""
_CHUNKS = ((256, 1), (1024, 4), (4096, 8))
"""How many pairs a program compares at a time, and with how many warps: the first that is enough for all pairs, or the
last. There are few, as each is compiled."""
_FEW_PAIRS = 16384
"""The most pairs that programs look at together."""
_PLACED, _SUMMED, _COMPARED = 512, 8, 16
"""Pairs of a chunk where there are more; chunks whose counts are added up at a time, and pairs that those of a chunk
are compared with."""


class WorkList(NamedTuple):
    """The sorted pairs, and tiles of them."""

    order: Tensor
    """[T × k] int32: the pairs, those of the first expert first, in ascending order for each expert. What is behind the
    last one is undefined."""
    items: Tensor
    """[N, ITEM_FIELDS] int32."""
    row_tile: int
    """The most pairs of an item."""


@triton.jit(do_not_specialize=["num_pairs"])
def _group_kernel(
    experts_ptr,  # [num_pairs] int32
    order_ptr,  # [num_pairs] int32, written
    items_ptr,  # [N, ITEM_FIELDS] int32, written
    num_pairs,
    ROW_TILE: tl.constexpr,
    BY_PAIR: tl.constexpr,
    FIRST_EXPERT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,  # that are held here, from FIRST_EXPERT on
    HAS_OTHERS: tl.constexpr,  # whether there are more
    CHUNK: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (expert), or with BY_PAIR program (pair), which works for its expert if no earlier pair has that one."""
    await_kernel_before(DEPENDENT)
    program = tl.program_id(0)
    columns = tl.arange(0, CHUNK)
    expert = program + FIRST_EXPERT
    if BY_PAIR:
        expert = tl.load(experts_ptr + program)
    lower = tl.zeros([CHUNK], tl.int32)
    equal = tl.zeros([CHUNK], tl.int32)
    earlier = tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pairs = start + columns
        others = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=2147483647)
        if HAS_OTHERS:
            lower += ((others >= FIRST_EXPERT) & (others < expert)).to(tl.int32)
        else:
            lower += (others < expert).to(tl.int32)
        equal += (others == expert).to(tl.int32)
        if BY_PAIR:
            earlier += ((others == expert) & (pairs < program)).to(tl.int32)
    first = tl.sum(lower, 0)
    count = tl.sum(equal, 0)
    if BY_PAIR:
        count = tl.where(tl.sum(earlier, 0) > 0, 0, count)
        if HAS_OTHERS:
            count = tl.where((expert < FIRST_EXPERT) | (expert >= FIRST_EXPERT + NUM_EXPERTS), 0, count)
    if count > 0:
        place = first
        for start in range(0, num_pairs, CHUNK):
            pairs = start + columns
            others = tl.load(experts_ptr + pairs, mask=pairs < num_pairs, other=2147483647)
            is_mine = (others == expert).to(tl.int32)
            tl.store(order_ptr + place + tl.cumsum(is_mine, 0) - is_mine, pairs, mask=is_mine > 0)
            place += tl.sum(is_mine, 0)
    if BY_PAIR:
        _write_items(items_ptr, program, program + 1, expert - FIRST_EXPERT, first, count, ROW_TILE, ITEM_FIELDS)
    else:
        _write_items_of(items_ptr, program, first, count, num_pairs, ROW_TILE, NUM_EXPERTS, HAS_OTHERS, ITEM_FIELDS)


@triton.jit
def _write_items_of(
    items_ptr,
    expert,
    first,
    count,
    num_pairs,
    ROW_TILE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_OTHERS: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
):
    """Write the items of an expert with `count` pairs from place `first` on."""
    end = expert + 1 + (first + count) // ROW_TILE
    if HAS_OTHERS and expert == NUM_EXPERTS - 1:  # the room for pairs that are not here
        end = NUM_EXPERTS + num_pairs // ROW_TILE
    _write_items(items_ptr, expert + first // ROW_TILE, end, expert, first, count, ROW_TILE, ITEM_FIELDS)


@triton.jit
def _write_items(items_ptr, entry, end, expert, first, count, ROW_TILE: tl.constexpr, ITEM_FIELDS: tl.constexpr):
    fields = tl.arange(0, ITEM_FIELDS)
    done = 0
    for index in range(entry, end):
        rows = tl.minimum(tl.maximum(count - done, 0), ROW_TILE)
        item = tl.where(fields == 0, expert, tl.where(fields == 1, first + done, tl.where(fields == 2, rows, 0)))
        tl.store(items_ptr + index * ITEM_FIELDS + fields, item)
        done += ROW_TILE


@triton.jit
def _load_held(experts_ptr, pairs, num_pairs, FIRST_EXPERT: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """Load the experts of pairs, as numbers of those that are held, or NUM_EXPERTS."""
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


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"])
def _place_kernel(
    experts_ptr,  # [num_pairs] int32
    counts_ptr,  # [num_chunks, BINS] int32
    order_ptr,  # [num_pairs] int32, written
    items_ptr,  # [N, ITEM_FIELDS] int32, written
    num_pairs,
    num_chunks,
    ROW_TILE: tl.constexpr,
    FIRST_EXPERT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HAS_OTHERS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    SUMMED: tl.constexpr,
    COMPARED: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (chunk and expert), where there are such ones."""
    await_kernel_before(DEPENDENT)
    program = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for start in range(0, num_chunks, SUMMED):
        chunks = start + tl.arange(0, SUMMED)
        counts_ptrs = counts_ptr + chunks[:, None] * BINS + bins[None, :]
        counts = tl.load(counts_ptrs, mask=(chunks < num_chunks)[:, None], other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((chunks < program)[:, None], counts, 0), 0)
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
    if program < NUM_EXPERTS:
        mine = bins == program
        first_pair, count = tl.sum(tl.where(mine, first, 0), 0), tl.sum(tl.where(mine, total, 0), 0)
        _write_items_of(
            items_ptr, program, first_pair, count, num_pairs, ROW_TILE, NUM_EXPERTS, HAS_OTHERS, ITEM_FIELDS
        )


def group_by_expert(
    experts: Tensor, num_experts: int, row_tile: int, *, first_expert: int = 0, num_others: int = 0
) -> WorkList:
    """Sort the pairs by expert and list the tiles. experts: [T, k] int32, contiguous, a token's k all different.

    `num_experts` are held here, from `first_expert` on, and `num_others` elsewhere. Items number those that are held
    from 0.
    """
    num_tokens, experts_per_token = experts.shape
    num_pairs = num_tokens * experts_per_token
    # An expert has no more pairs than there are tokens, so one item holds them all.
    by_pair = num_tokens <= row_tile and num_pairs < num_experts + num_pairs // row_tile
    num_items = num_pairs if by_pair else num_experts + num_pairs // row_tile
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    items = torch.empty(num_items, ITEM_FIELDS, dtype=torch.int32, device=experts.device)
    constants = {
        "ROW_TILE": row_tile,
        "FIRST_EXPERT": first_expert,
        "NUM_EXPERTS": num_experts,
        "HAS_OTHERS": num_others > 0,
        "ITEM_FIELDS": ITEM_FIELDS,
        **dependent(experts.device),
    }
    if num_pairs > _FEW_PAIRS:
        _group_many(experts, order, items, constants)
        return WorkList(order, items, row_tile)
    chunk, num_warps = next((one for one in _CHUNKS if num_pairs <= one[0]), _CHUNKS[-1])
    _group_kernel[(num_pairs if by_pair else num_experts,)](
        experts, order, items, num_pairs, BY_PAIR=by_pair, CHUNK=chunk, num_warps=num_warps, **constants
    )
    return WorkList(order, items, row_tile)


def _group_many(experts: Tensor, order: Tensor, items: Tensor, constants: dict[str, Any]) -> None:
    num_pairs, num_experts = len(order), constants["NUM_EXPERTS"]
    num_chunks, bins = ceil_div(num_pairs, _PLACED), next_power_of_2(num_experts + 1)
    counts = torch.empty(num_chunks, bins, dtype=torch.int32, device=experts.device)
    counted = {name: constants[name] for name in constants if name not in ("ROW_TILE", "HAS_OTHERS", "ITEM_FIELDS")}
    _count_kernel[(num_chunks,)](experts, counts, num_pairs, BINS=bins, CHUNK=_PLACED, num_warps=4, **counted)
    _place_kernel[(max(num_chunks, num_experts),)](
        experts,
        counts,
        order,
        items,
        num_pairs,
        num_chunks,
        BINS=bins,
        CHUNK=_PLACED,
        SUMMED=_SUMMED,
        COMPARED=_COMPARED,
        num_warps=8,
        **constants,
    )
