"""Paged decode attention in Triton: the query tokens of each request, one or a last token and drafts, over its keys and
values in blocks.

There are four kernels: that of `decode_kernel.py`, one for FP8 keys and few queries (`fp8_decode_attention.py`), one
for latents on Hopper GPUs (`hopper_latent_kernel.py`), and that of batch-invariant runs (`invariant_attention.py`). The
grids of all but Hopper's hold the most chunks that the rows can be cut into; programs behind the list's end leave at
once, so that a launch captured in a CUDA graph serves any lengths.

Held to `attention/torch_backend.py` by tests/attention.
Shapes: B rows, T tokens, H query heads, KV heads, G = H / KV, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from nvcli.kernels.triton.attention.attention_fold import Tile
from nvcli.kernels.triton.attention.attention_launch import AttentionLauncher, AttentionShape, LayerInputs
from nvcli.kernels.triton.attention.decode_kernel import decode_attention_kernel
from nvcli.kernels.triton.attention.decode_work_list import (
    FEW_ROWS,
    MAX_PARTIALS,
    SPLIT,
    USUAL_PROGRAMS,
    DecodeWorkList,
    RowTokens,
)
from nvcli.kernels.triton.attention.invariant_attention import (
    invariant_attention_kernel,
    invariant_decode_tile,
    invariant_draft_tile,
    invariant_registers,
)
from nvcli.kernels.triton.attention.latent_shares import HopperLatents, serves_latents
from nvcli.kernels.triton.launch.dependent_launch import dependent
from nvcli.kernels.triton.launch.multiprocessors import shared_memory_bytes
from nvcli.kernels.triton.launch.triton_version import has_known_gluon
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2

_DIRECT_TILE, _DIRECT_TILE_OF_MANY_ROWS = 32, 16
"""Keys of a tile of `fp8_decode_attention.py`. With 16, a multiprocessor has room for 16 programs instead of 12, but
each of them is slower, and so is the end of a step in which all are resident at once: an H200 takes 121 µs with 32 and
139 with 16 for 256 rows of 100 to 1,620 keys, 425 and 419 for 1,024 such rows, 552 and 532 for 1,024 of about 1,100."""
_MANY_ROWS = 512
"""From this many rows on, tiles of `fp8_decode_attention.py` have the smaller size, if a KV head has at most 8 queries.
With 16, of one KV head, it takes an H200 83 µs with 32 and 100 with 16 for 512 rows of 1,000 to 2,000 keys."""
_FEWEST_ROWS = ((8, 3), (16, 32))
"""From this many rows on, `fp8_decode_attention.py` is used, by the most queries of a row for a KV head. With 4 it
takes an H200 11.6 µs for 4 rows of 860 keys, where the kernel of `decode_kernel.py` takes 12.1; 16 and 23 for 16 of
860, 74 and 103 for 16 of 8,192, and 73 and 130 for 32 of 4,000. With 8, those of several tokens, it takes 145 for 256
rows of 500 to 1,500 keys, 19 for 16 and 319 for 40 of 16,000, where the other kernel takes 179, 26 and 527; with 16 it
takes 152, 29 and 449, and the other 180, 27 and 527; with 12 for each of 8 KV heads 134 and 169 for 256 rows of 100 to
1,620, with 16 for a lone one 29 and 38. A warm-up runs 64 rows and 2, so that both kernels are compiled before they are
needed."""
_TILE_BYTES = 16 << 10
"""Bytes of keys, and as many of values, in each pipeline stage: more loses occupancy (measured on an H200)."""

_DEEP_PROGRAMS = 3
"""Programs of latent attention to aim for on each multiprocessor, where they run one after another."""


def _load_direct_kernel(shape: AttentionShape, align: int) -> JITFunction[...] | None:
    """Load the kernel of `fp8_decode_attention.py` if it serves such heads, in chunks that begin at multiples of
    `align`, which divides the size of a block."""
    serves = (
        shape.is_fp8
        and shape.device.type == "cuda"
        and torch.cuda.get_device_capability(shape.device) >= (8, 9)
        and has_known_gluon()
        and shape.head_dim in (64, 128)
        and shape.tail_dim == 0
        and not shape.has_bias
        and shape.group <= 16
        and align % _DIRECT_TILE == 0
        and shape.dtype.itemsize == 2
    )
    if not serves:
        return None
    from nvcli.kernels.triton.attention.fp8_decode_attention import fp8_decode_attention_kernel

    return fp8_decode_attention_kernel


def _latent_keys(shape: AttentionShape) -> int:
    """Choose the keys of a tile of latent attention in 16 bits. There are no values to be read beside them, and two
    tiles of the usual size (147 KiB) fit in the shared memory of GPUs for servers."""
    return 64 if shared_memory_bytes(shape.device) >= 160 << 10 else 32


def _has_deep_latents(shape: AttentionShape) -> bool:
    """Whether a program of latent attention loads a tile while it computes another, and has a multiprocessor to itself:
    two tiles fit beside the queries in the shared memory of Hopper's and later GPUs for servers."""
    return shape.dtype.itemsize <= 2 and shared_memory_bytes(shape.device) >= 200 << 10


class DecodeAttention:
    """Decode attention of one geometry: its work lists and scratch memory, allocated once for a run.

    Call `plan` each step, then `run` in each layer. Neither waits for the device or allocates anything, so both may be
    captured in a CUDA graph. Everything must be launched on one stream at a time: the scratch memory is shared.

    max_width, max_tokens: the most tokens of a row, and of all rows that have several.
    is_beside: the kernel begins as soon as the one launched just before lets it, and ends after it
    (`hopper_segment_kernel.py`). It has a part of the multiprocessors, and tiles of half the size, so that twice as
    many programs run on each.
    is_invariant: rows get the same bits in every batch (`invariant_attention.py`).
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        windows: Iterable[int | None],
        max_rows: int,
        max_width: int = 1,
        max_tokens: int = 0,
        is_beside: bool = False,
        is_invariant: bool = False,
    ) -> None:
        assert not is_invariant or shape.kv_dtype == shape.dtype
        self._shape, self._is_beside, self._is_invariant = shape, is_beside, is_invariant
        self._launch = AttentionLauncher(shape, is_invariant=is_invariant).launch
        tile_bytes = _TILE_BYTES // 2 if is_beside else _TILE_BYTES
        self._keys = min(64, max(16, tile_bytes // (shape.tile_dim * shape.dtype.itemsize)))
        if not shape.has_values and shape.dtype.itemsize <= 2:
            self._keys = _latent_keys(shape)
        elif shape.has_bias:  # whose addresses take registers, too
            self._keys = min(32, self._keys)
        self._is_full_tile = self._keys * shape.tile_dim * shape.kv_dtype.itemsize == tile_bytes
        self._align = self._keys if shape.block_size % self._keys == 0 else 1
        self._is_deep = not shape.has_values and _has_deep_latents(shape) and not is_invariant
        self._direct_kernel = _load_direct_kernel(shape, self._align)
        self._max_rows = max_rows
        self._lists = {window: self.work_list(window) for window in windows}
        self._latents: HopperLatents | None = None
        if not is_beside and not is_invariant and not any(self._lists) and serves_latents(shape):
            self._latents = HopperLatents(shape, max_rows=max_rows, max_width=max_width)
        most_chunks = max(one.max_partials for one in self._lists.values())
        most_queries, most_tiles = most_chunks * shape.group, max(max_rows, most_chunks)
        self._has_tiles = not shape.has_values and not is_invariant
        for width in range(1 if self._has_tiles else 2, max_width + 1):
            num_rows, num_tiles = min(max_rows, max_tokens // width) if width > 1 else max_rows, self._num_tiles(width)
            num_queries = num_tiles * self._draft_tile(width).rows
            most_tiles = max(most_tiles, num_rows * num_tiles)
            own = MAX_PARTIALS.value * shape.group + num_rows * num_queries
            most_queries = max(most_queries, own if is_invariant else most_chunks * num_queries)
        partials = most_queries * shape.num_kv_heads
        self._memory = [torch.empty(partials, shape.head_dim, dtype=torch.float32, device=shape.device)]
        for _ in range(2 if is_invariant else 1):
            self._memory.append(torch.empty(partials, dtype=torch.float32, device=shape.device))
        self._memory.append(torch.zeros(most_tiles, shape.num_kv_heads, dtype=torch.int32, device=shape.device))

    def work_list(self, window: int | None) -> DecodeWorkList:
        """Make a work list for this geometry."""
        return DecodeWorkList(
            window=window,
            num_kv_heads=self._shape.num_kv_heads,
            tile=self._keys,
            align=SPLIT.value if self._is_invariant else self._align,
            max_rows=self._max_rows,
            device=self._shape.device,
            lone_warps=()
            if self._direct_kernel is None
            else [(queries // self._shape.group, rows) for queries, rows in _FEWEST_ROWS],
            has_splits=self._is_invariant,
            programs=_DEEP_PROGRAMS if self._is_deep else USUAL_PROGRAMS,
            has_one_for_short=self._is_deep,
        )

    def plan(self, seq_lens: Tensor, slots: Tensor, tokens: RowTokens | None = None) -> None:
        """List the step's chunks. seq_lens: [B] int32, keys of each row, 0 for padding; slots: [B] int64, the slot of
        each row, by which its block table is found; tokens: those of rows that may have several (None: one each)."""
        if self._latents is not None and self._latents.takes(len(seq_lens)):
            self._latents.plan(seq_lens, slots, tokens)
            return
        max_partials = MAX_PARTIALS.value
        if tokens is not None:
            queries = self._num_tiles(tokens.width) * self._draft_tile(tokens.width).rows
            max_partials = max_partials * self._shape.group // queries
        for work_list in self._lists.values():
            work_list.plan(seq_lens, slots, tokens=tokens, max_partials=max_partials)

    def run(
        self,
        layer: LayerInputs,
        out: Tensor,
        own: tuple[DecodeWorkList, Tensor] | None = None,
        tokens: RowTokens | None = None,
    ) -> None:
        """Attend as planned, in one of the windows that this was made for. q, out: [T, H, D], with T = B for rows of
        one token; out is contiguous.

        `own`: the list of the keys that are to be attended, planned by the caller, and the tensor for the log-sum-exp
        of their scores, at least [T, H] float32, base 2.
        """
        assert out.is_contiguous()
        shape, starts, width = self._shape, None, 1
        num_rows = layer.q.shape[0]
        if tokens is not None:
            starts, width = tokens
            num_rows = len(starts) - 1
        if self._latents is not None and own is None and self._latents.takes(num_rows):
            self._latents.run(layer, out, tokens)
            return
        work_list, log_sums = (self._lists[layer.window], None) if own is None else own
        memory = out, work_list.items, work_list.num_items, starts, log_sums, *self._memory
        has_tiles = self._has_tiles or tokens is not None
        num_heads = shape.num_kv_heads * self._num_tiles(width) if has_tiles else shape.num_kv_heads
        grid: tuple[int, ...] = (num_heads, work_list.capacity(num_rows, tokens))
        if self._is_invariant:
            tile, registers = self._draft_tile(width), None
            if tokens is None:
                tile, grid = invariant_decode_tile(shape, num_rows), (math.prod(grid),)
                registers = invariant_registers(shape, tile)
            self._launch(invariant_attention_kernel, grid, layer, memory, tile, True, maxnreg=registers)
        elif work_list.has_lone_warps(num_rows, tokens):
            assert not self._is_beside
            is_many = tokens is None and num_rows >= _MANY_ROWS and shape.group <= 8
            keys = _DIRECT_TILE_OF_MANY_ROWS if is_many else _DIRECT_TILE
            tile = Tile(rows=8 if width * shape.group <= 8 else 16, keys=keys, num_warps=1, num_stages=1)
            grid = shape.num_kv_heads, grid[1]
            self._launch(self._direct_kernel, grid, layer, memory, tile)
        else:
            waits = not self._is_beside and dependent(shape.device)["DEPENDENT"]
            tile = self._tile(num_rows) if tokens is None else self._draft_tile(width)
            constants = tile, self._is_beside, waits
            memory = *memory, *(layer.bias or (None, None))
            self._launch(decode_attention_kernel, grid, layer, memory, *constants, launch_pdl=self._is_beside or waits)

    def _tile(self, num_rows: int) -> Tile:
        """Choose the tiles. Those in FP8 stand in registers twice, as they are read and as they are multiplied, so
        large heads take more warps."""
        shape = self._shape
        if not shape.has_values:
            return self._latent_tile(shape.group)
        num_warps = 2 if shape.tile_dim <= 256 else 4
        return Tile(
            rows=max(16, next_power_of_2(shape.group)),
            keys=self._keys,
            num_warps=2 * num_warps if shape.is_fp8 and shape.tile_dim > 128 else num_warps,
            num_stages=2 if self._is_full_tile and num_rows > FEW_ROWS else 3,
        )

    def _latent_tile(self, num_queries: int) -> Tile:
        """Choose the tiles of latent attention, whose heads share one key and are all in one tile.

        On an H200 a layer of 16 heads takes, with tiles of 64 keys, 4 warps and 3 stages, 118 µs for 256 rows of 1,500
        keys (84 % of the memory's bandwidth), 73 for 256 of 100 to 1,620, 33 for 64 of those and 337 for 64 of 16,000;
        with 2 stages, and 4 programs on each multiprocessor, 129, 88, 40 and 347. With 20 heads 149, 95, 45 and 433
        (with 2 programs), and 166, 121, 58 and 452. With 32 keys, with 8 warps and with the products turned round
        (keys × queries) it takes longer.

        In FP8, where tiles stand in registers twice, 16 heads take with 8 warps 215, 131 and 647 (with 2 programs) for
        the first two and the last of these, and with 4 warps and 2 stages 214, 152 and 674.
        """
        rows = min(64, max(16, next_power_of_2(num_queries)))
        if rows > 32:
            return Tile(rows=rows, keys=self._keys, num_warps=8, num_stages=2)
        num_warps = 8 if self._shape.is_fp8 else 4
        return Tile(rows=rows, keys=self._keys, num_warps=num_warps, num_stages=3 if self._is_deep else 2)

    def _num_tiles(self, width: int) -> int:
        """Return the tiles of a row's queries in a KV head, with up to `width` tokens a row."""
        return ceil_div(width * self._shape.group, self._draft_tile(width).rows)

    def _draft_tile(self, width: int) -> Tile:
        """Choose the tiles for rows of up to `width` tokens. It is the same for any number of rows, so that a warm-up
        need not run many.

        On an H200 a layer of 32 query heads and 8 KV heads of 128 takes, with 4 and with 8 tokens a row, 255 and 275 µs
        for 256 rows of 500 to 1,500 keys in bfloat16, where one token takes 250 and the prefill kernel 345 and 347; 29
        and 34 for 16 such rows (26; 32 and 32); 605 and 685 for 40 rows of 16,000 (612; 755 and 756). With 2 warps and
        2 stages, tiles of 16 queries take 735 there. In FP8, 8 tokens a row take 334, 38 and 816 (one: 140, 16 and 316;
        prefill: 738, 63 and 2,154).
        """
        shape = self._shape
        if self._is_invariant:
            return invariant_draft_tile(shape, width)
        if not shape.has_values:
            return self._latent_tile(width * shape.group)
        usual = self._tile(FEW_ROWS + 1)
        most = 64 if shape.tile_dim <= 128 else 32 if shape.tile_dim <= 256 else 16
        rows = max(usual.rows, min(most, next_power_of_2(width * shape.group)))
        if shape.tile_dim > 128:
            return replace(usual, rows=rows, num_warps=max(usual.num_warps, rows // 16))
        is_small = rows <= 16
        return Tile(
            rows=rows,
            keys=self._keys,
            num_warps=2 if is_small and shape.is_fp8 else 4,
            num_stages=2 if is_small and not shape.is_fp8 else 3,
        )
