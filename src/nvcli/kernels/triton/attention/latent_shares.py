"""Attention over latents on Hopper GPUs, of decode rows to all their keys and of any tokens to a choice of them or to
compressed ones and a window: the work list of `hopper_latent_kernel.py`, and its launch.

There is one program for each multiprocessor, and each takes an equal share of all rows' tiles of keys, one row behind
another. Where programs have several rows, those of one lie apart: each row takes some time besides, and the tokens at a
prompt's beginning have few keys (the first 8,192 tokens of a prompt, 64 heads and 2,048 chosen keys: 3.9 ms on an H200,
and 6.5 with rows side by side). A row that lies in several shares is reduced by the last of their programs to finish.
A share of few long rows is not below the square root of their tiles, as otherwise there were more results to reduce
than keys to attend.

Shapes: B rows, T tokens, H heads, G queries of a row, D numbers of a value.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.chosen_keys import WindowKeys
from nvcli.kernels.triton.attention.attention_fold import ITEM_FIELDS, store_item
from nvcli.kernels.triton.attention.attention_launch import AttentionLauncher, AttentionShape, LayerInputs
from nvcli.kernels.triton.attention.decode_work_list import RowTokens
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors
from nvcli.kernels.triton.launch.triton_version import has_known_gluon
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_KEYS = tl.constexpr(64)
"""Keys of a tile."""
_MOST_ROWS = 64
"""The most queries of a tile."""
_ALL_KEYS = 2**31 - 1
_FEWEST_CHOOSING_ROWS = 16
"""The fewest rows with chosen keys that are served. With 2,048 keys each an H200 takes 22 and 44 µs for 16 rows of 16
and of 128 heads, where `attend_chosen.py` takes 24 and 58, but 21 and 48 for 8, where that takes 19 and 35."""
_MOST_ROWS_IN_16_BITS = 64
"""The most rows of a step that are served from a cache in 16 bits, with up to 32 heads. With 16 heads an H200 takes
33 µs for 64 rows of 100 to 1,620 keys, where `decode_kernel.py` takes 34, but 81 for 256 of them, where that takes 70;
with 64 heads it takes 135 for these, as that does, and 102 for 256 rows of 1,000, where that takes 154."""
_ROWS, _COLUMNS = tl.constexpr(16), tl.constexpr(256)
"""The rows of a planning program, and the rows with which it compares them at a time."""


class NearKeys(NamedTuple):
    """The keys of a window in a cache of their own, as a compile-time constant."""

    size: int
    """The most of them."""
    block_size: int
    block_stride: int
    row_size: int
    """Numbers from one token of a block to the next."""


@triton.jit
def _tiles(seq_lens, near_seen, places, stride, num_rows, most_keys, most_near):
    """Return the rows in some places of the order, their tiles, and their keys. A row has one tile at least, as one
    without keys, which is padding, has a result too."""
    rows = places * stride % num_rows
    lens = tl.minimum(tl.load(seq_lens + rows, mask=places < num_rows, other=0), most_keys)
    if near_seen is not None:
        lens += tl.minimum(tl.load(near_seen + rows, mask=places < num_rows, other=0), most_near)
    return rows, tl.where(places < num_rows, tl.maximum(tl.cdiv(lens, _KEYS), 1), 0), lens


@triton.jit(
    do_not_specialize=["num_rows", "num_shares", "stride", "most_keys", "most_near"],
    do_not_specialize_on_alignment=["seq_lens", "near_seen", "slots"],
)
def plan_shares_kernel(
    seq_lens,  # [num_rows] int32, keys of each row
    near_seen,  # [num_rows] int32, tokens that each row sees, the last of which are in its window; None: it has none
    slots,  # [num_rows] int64
    # [num_rows + num_shares, ITEM_FIELDS] int32, written: row, first key, end of the keys, number of the row's chunks,
    # the share of its first one, number of this chunk, the row's slot, and the row's keys
    items,
    shares,  # [num_shares, 2] int32, written: the first item of each share, and the end of its items
    num_rows,
    num_shares,
    stride,  # the row in place i of the order is number i × stride % num_rows
    most_keys,  # of a row
    most_near,  # of its window
):
    """Program i lists the chunks of _ROWS rows. The chunk of the row in place r that is in share s is item r + s."""
    columns = tl.arange(0, _COLUMNS)
    places = tl.program_id(0) * _ROWS + tl.arange(0, _ROWS)
    rows, num_tiles, lens = _tiles(seq_lens, near_seen, places, stride, num_rows, most_keys, most_near)
    first = tl.zeros([_ROWS], tl.int32)
    total = tl.zeros([_COLUMNS], tl.int32)
    for start in range(0, num_rows, _COLUMNS):
        others = start + columns
        _, of_others, _ = _tiles(seq_lens, near_seen, others, stride, num_rows, most_keys, most_near)
        total += of_others
        first += tl.sum(tl.where(others[None, :] < places[:, None], of_others[None, :], 0), 1)
    all_tiles = tl.sum(total, 0)
    longest = tl.max(total, 0)  # where rows are few, each is alone in its column
    share = tl.maximum(tl.cdiv(all_tiles, num_shares), tl.sqrt(longest.to(tl.float32)).to(tl.int32))
    if num_rows > _COLUMNS:
        share = tl.cdiv(all_tiles, num_shares)

    is_row = places < num_rows
    row_slots = tl.load(slots + rows, mask=is_row, other=0).to(tl.int32)
    end = first + num_tiles
    first_share = first // share
    num_chunks = tl.where(is_row, (end - 1) // share - first_share + 1, 0)
    for index in range(tl.max(num_chunks, 0)):
        is_mine = index < num_chunks
        number = first_share + index
        chunk_first = tl.maximum(number * share, first)
        chunk_end = tl.minimum((number + 1) * share, end)
        item = items + (places + number) * ITEM_FIELDS
        begin, end_key = (chunk_first - first) * _KEYS, tl.minimum((chunk_end - first) * _KEYS, lens)
        store_item(item, (rows, begin, end_key, num_chunks, first_share, index, row_slots, lens), is_mine)
        tl.store(shares + 2 * number, places + number, mask=is_mine & (number * share >= first))
        is_end = ((number + 1) * share <= end) | (places == num_rows - 1)
        tl.store(shares + 2 * number + 1, places + number + 1, mask=is_mine & is_end)
    if tl.program_id(0) == 0:
        for start in range(tl.cdiv(all_tiles, share), num_shares, _COLUMNS):
            unused = start + columns
            none = tl.zeros([_COLUMNS], tl.int32)
            tl.store(shares + 2 * unused, none, mask=unused < num_shares)
            tl.store(shares + 2 * unused + 1, none, mask=unused < num_shares)


def serves_latents(shape: AttentionShape) -> bool:
    """Tell whether the kernel for Hopper GPUs serves such heads."""
    return (
        shape.device.type == "cuda"
        and torch.cuda.get_device_capability(shape.device) == (9, 0)
        and has_known_gluon()
        and not shape.has_values
        and shape.tail_dim in (0, 64)
        and shape.head_dim in (256, 512)
        and shape.num_kv_heads == 1
        and shape.dtype.itemsize == 2
        and (shape.block_size % 64 == 0 if shape.is_fp8 else shape.kv_dtype == shape.dtype)
    )


class HopperLatents:
    """Attention over latents: its work list and scratch memory, allocated once for a run.

    Call `plan` each step, then `run` in each layer, as for `DecodeAttention`.

    max_width: the most tokens of a row.
    top_k: the most keys of a row, which are chosen; None: rows attend to all their keys.
    window: the most keys of a row's last tokens, to which it attends besides; 0: it has no window. With either, rows
    have one token, and a cache in 16 bits.
    """

    def __init__(
        self, shape: AttentionShape, *, max_rows: int, max_width: int = 1, top_k: int | None = None, window: int = 0
    ) -> None:
        from nvcli.kernels.triton.attention import hopper_latent_kernel as kernels

        self._shape, self._kernel, self._top_k, self._window = shape, kernels.hopper_latent_kernel, top_k, window
        self._is_of_tokens = top_k is not None or window > 0
        self._launch = AttentionLauncher(shape, has_gaps=self._is_of_tokens).launch
        self._num_programs = num_multiprocessors(shape.device)
        most_queries = next_power_of_2(shape.group * max_width)
        num_tiles = ceil_div(most_queries, _MOST_ROWS)
        most_items, device = max_rows + self._num_programs, shape.device
        self._items = torch.zeros(most_items, ITEM_FIELDS.value, dtype=torch.int32, device=device)
        self._shares = torch.zeros(self._num_programs, 2, dtype=torch.int32, device=device)
        self._arrivals = torch.zeros(2 * max_rows * num_tiles, dtype=torch.int32, device=device)
        of_shares = 2 * max(self._num_programs, num_tiles) * max(16, min(_MOST_ROWS, most_queries))
        self._partial_out = torch.empty(of_shares, shape.head_dim, dtype=torch.float32, device=device)
        self._partial_lse = torch.empty(of_shares, dtype=torch.float32, device=device)

    def takes(self, num_rows: int) -> bool:
        """Tell whether steps of this many rows are served, as they take less time than with `decode_kernel.py`, or with
        `attend_chosen.py`."""
        shape = self._shape
        if self._is_of_tokens:
            return num_rows >= _FEWEST_CHOOSING_ROWS
        return shape.is_fp8 or shape.group > 32 or num_rows <= _MOST_ROWS_IN_16_BITS

    def _tile(self, tokens: RowTokens | None) -> tuple[int, int, int]:
        """Return the queries of a tile, the tiles of a row, and the shares."""
        num_queries = self._shape.group * (1 if tokens is None else tokens.width)
        rows = max(16, min(_MOST_ROWS, next_power_of_2(num_queries)))
        num_tiles = ceil_div(num_queries, rows)
        return rows, num_tiles, max(1, self._num_programs // num_tiles)

    def plan(
        self, seq_lens: Tensor, slots: Tensor, tokens: RowTokens | None = None, near_seen: Tensor | None = None
    ) -> None:
        """List the step's work; the arguments are those of `DecodeAttention.plan`. near_seen: with a window, [B] int32,
        the keys of tokens that each row sees, of which it has the last ones."""
        assert (near_seen is not None) == (self._window > 0)
        num_rows = len(seq_lens)
        _, _, num_shares = self._tile(tokens)
        most_keys = _ALL_KEYS if self._top_k is None else self._top_k
        stride = num_shares if num_rows > num_shares else 1
        while math.gcd(stride, num_rows) > 1:
            stride += 1
        plan_shares_kernel[(triton.cdiv(num_rows, _ROWS.value),)](
            seq_lens,
            near_seen,
            slots,
            self._items,
            self._shares,
            num_rows,
            num_shares,
            stride,
            most_keys,
            self._window,
            num_warps=4,
        )

    def run_chosen(
        self,
        queries: Tensor,
        keys: Tensor,
        tables: Tensor,
        chosen: Tensor | None,
        out: Tensor,
        *,
        scale: float,
        sinks: Tensor | None = None,
        window: WindowKeys | None = None,
    ) -> None:
        """Attend to the chosen keys and those of the window as planned; keys: [blocks, block_size, 1, D and the tail],
        the rest as of `nvcli.kernels.chosen_keys.attend_chosen`."""
        self.run(LayerInputs(queries, keys, keys, tables, scale, sinks=sinks), out, chosen=chosen, window=window)

    def run(
        self,
        layer: LayerInputs,
        out: Tensor,
        tokens: RowTokens | None = None,
        chosen: Tensor | None = None,
        window: WindowKeys | None = None,
    ) -> None:
        """Attend as planned; the arguments are those of `DecodeAttention.run`. chosen: [B, top_k] int32, the positions
        of each row's keys; window: the keys of the window."""
        assert layer.window is None
        assert layer.soft_cap is None
        rows, num_tiles, num_shares = self._tile(tokens)
        starts = None if tokens is None else tokens.starts
        words = scales = near = None
        if self._shape.is_fp8:
            words, scales = layer.k_cache.view(torch.int32), layer.k_cache.view(torch.bfloat16)
        of_window: tuple[Tensor | None, ...] = None, None, None
        if window is not None:
            cache, (seen, _, tables), size = window
            assert size == self._window
            assert tables.stride() == layer.block_tables.stride()
            near, of_window = NearKeys(size, cache.shape[1], cache.stride(0), cache.stride(1)), (cache, tables, seen)
        lists = out, self._items, self._shares, starts, self._partial_out, self._partial_lse, self._arrivals, chosen
        memory = words, scales, *lists, *of_window
        constants = rows, num_tiles, 0 if chosen is None else chosen.stride(0), near
        self._launch(self._kernel, (num_shares * num_tiles,), layer, memory, None, *constants, launch_pdl=True)
