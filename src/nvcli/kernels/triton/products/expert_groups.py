"""A step's pairs of token and expert, sorted by expert on the GPU, and the work list of the products over them.

An *item* of the list is up to `row_tile` pairs of one expert: one tile of rows of a product. How many items an expert
has is known on the GPU only, so the list has room for the most that there may be, and entries without rows are passed
over. Nothing has a size that depends on the routes: launches captured in a CUDA graph serve any of them.

A program looks at all pairs, and writes those of its own expert. Where it writes follows from how many pairs have lower
experts: no program waits for another. (To count chunks of pairs in a kernel before takes longer: 42 µs against 36 on an
H200 for 8,192 tokens with 8 of 128 experts, and 40 against 19 with 4 of 32. With 10 of 512 it would take 80 against 91.
Programs for several experts each take 141 there, and threads that each look at a run of pairs 105.) Expert e's items
begin at entry e + p // row_tile, with p the number of pairs before it, which leaves room for an incomplete item of
every expert. With few tokens, whose pairs are fewer than the experts, the entries belong to pairs instead: the first
pair of an expert has the item, the others have none.

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

from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent

ITEM_FIELDS = tl.constexpr(4)
"""The int32 words of an entry: expert, first place in the order, number of pairs (0: nothing to do), unused."""
_CHUNKS = ((256, 1), (1024, 4), (4096, 8))
"""How many pairs a program compares at a time, and with how many warps: the first that is enough for all pairs, or the
last. There are few, as each is compiled."""


class WorkList(NamedTuple):
    """The sorted pairs, and tiles of them."""

    order: Tensor
    """[T × k] int32: the pairs, those of the first expert first, in ascending order for each expert. What is behind the
    last one is undefined."""
    items: Tensor
    """[N, ITEM_FIELDS] int32."""
    row_tile: int
    """The most pairs of an item."""
    places: Tensor | None = None
    """[T × k] int32: where each pair is in the order, -1 if it is not."""


@triton.jit(do_not_specialize=["num_pairs"])
def _group_kernel(
    experts_ptr,  # [num_pairs] int32
    order_ptr,  # [num_pairs] int32, written
    places_ptr,  # [num_pairs] int32, written, or None
    items_ptr,  # [N, ITEM_FIELDS] int32, written
    num_pairs,
    ROW_TILE: tl.constexpr,
    BY_PAIR: tl.constexpr,
    FIRST_EXPERT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,  # that are held here, from FIRST_EXPERT on
    HAS_OTHERS: tl.constexpr,  # whether there are more
    CHUNK: tl.constexpr,
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
            places = place + tl.cumsum(is_mine, 0) - is_mine
            tl.store(order_ptr + places, pairs, mask=is_mine > 0)
            if places_ptr is not None:
                tl.store(places_ptr + pairs, places, mask=is_mine > 0)
            place += tl.sum(is_mine, 0)
    if BY_PAIR:
        entry, end = program, program + 1
    else:
        entry, end = program + first // ROW_TILE, program + 1 + (first + count) // ROW_TILE
        if HAS_OTHERS and program == NUM_EXPERTS - 1:  # the room for pairs that are not here
            end = NUM_EXPERTS + num_pairs // ROW_TILE
    fields = tl.arange(0, ITEM_FIELDS)
    done = 0
    for index in range(entry, end):
        rows = tl.minimum(tl.maximum(count - done, 0), ROW_TILE)
        held = expert - FIRST_EXPERT
        item = tl.where(fields == 0, held, tl.where(fields == 1, first + done, tl.where(fields == 2, rows, 0)))
        tl.store(items_ptr + index * ITEM_FIELDS + fields, item)
        done += ROW_TILE


def group_by_expert(
    experts: Tensor,
    num_experts: int,
    row_tile: int,
    *,
    first_expert: int = 0,
    num_others: int = 0,
    has_places: bool = False,
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
    places = torch.full_like(order, -1) if has_places else None
    items = torch.empty(num_items, ITEM_FIELDS.value, dtype=torch.int32, device=experts.device)
    chunk, num_warps = next((one for one in _CHUNKS if num_pairs <= one[0]), _CHUNKS[-1])
    _group_kernel[(num_pairs if by_pair else num_experts,)](
        experts,
        order,
        places,
        items,
        num_pairs,
        ROW_TILE=row_tile,
        BY_PAIR=by_pair,
        FIRST_EXPERT=first_expert,
        NUM_EXPERTS=num_experts,
        HAS_OTHERS=num_others > 0,
        CHUNK=chunk,
        num_warps=num_warps,
        **dependent(experts.device),
    )
    return WorkList(order, items, row_tile, places)
