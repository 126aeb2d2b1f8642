"""Paged attention over the segments of keys that requests share, for Hopper GPUs: the tiles of `segment_work_list.py`,
attended as `hopper_prefill_kernel.py` attends prefixes that chunks share.

A tile is up to 128 // G rows, which stand anywhere in the batch, with all their query heads of one KV head, against a
chunk of a segment. Every row sees all of its keys.

A program takes a whole multiprocessor, with all its registers. Tiles keep the tensor cores busy and the rows' own keys
the memory, so both are attended at the same time: enough programs stay to finish together with the kernel that is
launched next (`decode_attention.py`), but no fewer than a minimum share, and the others leave their multiprocessors to
that kernel. It may begin as soon as all programs of this one have (programmatic dependent launch).

Shapes: R rows, H query heads, KV heads, G = H / KV, D head_dim.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from nvcli.kernels.triton.attention.hopper_prefill_kernel import attend_tiles

_OWN_QUARTERS = gl.constexpr(3)
"""The time of a multiprocessor for one key of a row's own, in quarters of its time for one key of a tile."""
_LEAST_TWENTIETHS = gl.constexpr(13)
"""The minimum share of the multiprocessors for segments, in twentieths. With a smaller one, both parts together took
longer in every shape that was timed on an H200."""


@gluon.jit(do_not_specialize=["window", "block_table_stride"], do_not_specialize_on_alignment=["block_tables"])
def hopper_segment_kernel(
    q,  # [R, H, D], rows q_stride apart
    k_desc,  # of the cache as [rows, KV × D], a row for each token
    v_desc,
    block_tables,  # [slots, ...] int32, rows block_table_stride apart
    sinks,  # the rows' own keys have them
    v_cache,  # what v_desc describes
    partial_out,  # [partial results, H, D], written
    items,  # [capacity, ITEM_FIELDS] int32
    num_items,  # [1] int32
    partial_lse,  # [partial results, H] float32, base 2, written
    work,  # [2] int32, keys of all tiles, and keys of the rows' own
    members,  # [LEVELS × max_rows] int32
    first_partials,  # [LEVELS × max_rows] int32
    window,  # there is none
    scale_log2,
    q_stride,
    block_table_stride,
    KIND: gl.constexpr,
):
    gdc_launch_dependents()
    # Each program takes an item in each round. As few work as need no more rounds.
    num_tiles = gl.load(num_items) * KIND.num_kv_heads
    of_tiles = gl.load(work).to(gl.int64) * 4
    of_all = of_tiles + gl.load(work + 1).to(gl.int64) * _OWN_QUARTERS
    wanted = (gl.num_programs(0) * of_tiles // gl.maximum(of_all, 1)).to(gl.int32)
    wanted = gl.maximum(wanted, gl.maximum(gl.num_programs(0) * _LEAST_TWENTIETHS // 20, 1))
    num_rounds = gl.maximum((num_tiles + wanted // 2) // wanted, gl.cdiv(num_tiles, gl.num_programs(0)))
    num_programs = gl.cdiv(num_tiles, gl.maximum(num_rounds, 1))
    if gl.program_id(0) >= num_programs:
        return
    tiles = items, members, first_partials, num_tiles, num_programs
    attend_tiles(
        q, k_desc, v_desc, block_tables, sinks, v_cache, partial_out, partial_lse, tiles, scale_log2, q_stride,
        block_table_stride, KIND, True,
    )  # fmt: skip
