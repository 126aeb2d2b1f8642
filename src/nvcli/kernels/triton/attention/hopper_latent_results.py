"""Storing of results in `hopper_latent_kernel.py`: those of a row that lies in several shares are stored apart, and the
last of their programs to finish reduces them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nvcli.kernels.triton.attention.attention_fold import ITEM_FIELDS
from nvcli.kernels.triton.attention.hopper_latent_loads import WARPS
from nvcli.kernels.triton.launch.triton_version import barrier

LEAST = gl.constexpr(-1e30)
"""The initial reference of a query: finite, so that it can be subtracted from itself."""


@gluon.jit
def store_result(
    results, work, index, row, acc, places, stored, lse, lane, first_place, num_queries,
    PART: gl.constexpr,  # of so many numbers of the values, WIDTH, is the result
    HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Store an item's result. That of a chunk is stored apart, and the last chunk's group to come reduces a row's.
    A row without keys, which is padding, gets zeros."""
    out, partial_out, partial_lse, arrivals, query_tile, num_tiles = results
    item = work[0] + index * ITEM_FIELDS
    num_chunks = gl.load(item + 3)
    if num_chunks == 1:
        gl.store(out + first_place * HEAD_DIM + places, acc.to(out.dtype.element_ty), mask=stored)
    else:
        first_share = gl.load(item + 4)
        chunk = gl.load(item + 5)
        partial = (_partial(first_share, chunk) * num_tiles + query_tile) * ROWS
        gl.store(partial_out + partial * HEAD_DIM + places, acc, mask=stored)
        gl.store(partial_lse + partial + lane, lse, mask=lane < num_queries)
        # All threads have stored before one of them says so; acquire and release order it across programs.
        barrier()
        arrival = arrivals + (row * num_tiles + query_tile) * (HEAD_DIM // WIDTH) + PART
        arrived = gl.atomic_add(arrival, 1, sem="acq_rel")
        if arrived == num_chunks - 1:
            gl.store(arrival, 0)  # for the next layer
            for first_dim in gl.static_range(PART * WIDTH, (PART + 1) * WIDTH, min(WIDTH, 8192 // ROWS, 256)):
                _reduce(
                    results, first_share, num_chunks, first_place, num_queries, first_dim, HEAD_DIM, ROWS,
                    min(WIDTH, 8192 // ROWS, 256),
                )  # fmt: skip


@gluon.jit
def _partial(first_share, chunk):
    """Return the place of a chunk's result. A share ends within one row at most, and begins within one."""
    return 2 * (first_share + chunk) + gl.where(chunk == 0, 1, 0)


@gluon.jit
def _reduce(
    results, first_share, num_chunks, first_place, num_queries,
    FIRST_DIM: gl.constexpr, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Combine WIDTH numbers of the results of a row's chunks for a tile of queries, two chunks at a time."""
    out, partial_out, partial_lse, _arrivals, query_tile, num_tiles = results
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    lanes = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    is_query = lanes < num_queries
    dims = FIRST_DIM + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    highest = gl.full([ROWS], LEAST, gl.float32, gl.SliceLayout(1, layout))
    weight_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    acc = gl.zeros([ROWS, WIDTH], gl.float32, layout)
    for first in range(0, num_chunks, 2):
        # .cg: past the L1 cache, which may hold what was there before the other programs stored.
        place = (_partial(first_share, first) * num_tiles + query_tile) * ROWS + lanes
        second = (_partial(first_share, first + 1) * num_tiles + query_tile) * ROWS + lanes
        is_second = is_query & (first + 1 < num_chunks)
        lse = gl.load(partial_lse + place, mask=is_query, other=LEAST, cache_modifier=".cg")
        second_lse = gl.load(partial_lse + second, mask=is_second, other=-float("inf"), cache_modifier=".cg")
        value = gl.load(
            partial_out + (place[:, None] * HEAD_DIM + dims[None, :]),
            mask=is_query[:, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        second_value = gl.load(
            partial_out + (second[:, None] * HEAD_DIM + dims[None, :]),
            mask=is_second[:, None], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_highest = gl.maximum(highest, gl.maximum(lse, second_lse))
        decay = gl.exp2(highest - new_highest)
        weight = gl.exp2(lse - new_highest)
        second_weight = gl.exp2(second_lse - new_highest)
        weight_sum = weight_sum * decay + weight + second_weight
        acc = acc * decay[:, None] + value * weight[:, None] + second_value * second_weight[:, None]
        highest = new_highest
    acc = acc / gl.where(weight_sum > 0, weight_sum, 1.0)[:, None]
    places = (first_place + lanes)[:, None] * HEAD_DIM + dims[None, :]
    gl.store(out + places, acc.to(out.dtype.element_ty), mask=is_query[:, None])
