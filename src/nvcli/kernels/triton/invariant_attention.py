"""Paged attention in Triton that gives a token the same bits in every batch: decoded or in a chunk of any prompt, and
however many other rows there are.

A token's keys are cut into splits of SPLIT keys (`split_work_list.py`), counted from the request's first token, and a
split into tiles of KEYS keys. Within a split the softmax runs on from tile to tile (FlashAttention-2; Dao, 2023); the
splits' results are put together in their order. A tile whose keys a token does not see changes nothing of its result.
So the result follows from the token's position, whatever tile of queries it stands in, whichever program computes a
split, and whether one program computes all of a row's splits or a program each.

One kernel serves decode rows and prefill chunks. It is compiled for tiles of few queries and of many, which must not
show in the result: sums over a tile's keys are matrix products, too, whose order is the same in both, and what the
compiler might fuse is fused by hand.

Held to `attention/torch_backend.py` by tests/attention. Shapes: T tokens, B rows of one token, H query heads, KV heads,
G = H / KV, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from nvcli.kernels.triton.invariant_attention_kernel import invariant_attention_kernel
from nvcli.kernels.triton.prefill_tiles import PrefillTiles, TileKey
from nvcli.kernels.triton.split_work_list import MAX_PARTIALS, SPLIT, SplitWorkList

_LOG2_E = 1.4426950408889634
_TILE_BYTES = 16 << 10
"""Bytes of keys, and as many of values, in each pipeline stage."""
_DECODE_STAGES = 3
_FEW_ROWS = 64
"""Up to so many decode rows, programs of more warps are faster: Qwen3-8B's layer on an H200 takes 19 us for 16 rows of
860 keys with 4 warps and 25 with 2, and 219 and 215 us for 256 rows."""
_VERIFIED_CAPABILITY = (9, 0)
"""GPUs on which the matrix instructions of large tiles were seen to give the bits of those of small tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """The rows of a tile and how a program works."""

    rows: int
    num_warps: int
    num_stages: int


def _keys(head_dim: int, dtype: torch.dtype) -> int:
    """Choose the keys of a tile, on which results depend: by head size and type alone."""
    return min(64, max(16, _TILE_BYTES // (head_dim * dtype.itemsize)))


def _prefill_launch(head_dim: int, dtype: torch.dtype, device: torch.device) -> _Launch:
    if dtype.itemsize > 2:  # float32 runs without tensor cores: for tests
        return _Launch(rows=16, num_warps=4, num_stages=2)
    if head_dim > 256:
        return _Launch(rows=32, num_warps=8, num_stages=2)
    if torch.cuda.get_device_capability(device) != _VERIFIED_CAPABILITY:
        return _Launch(rows=32, num_warps=2 if head_dim <= 128 else 4, num_stages=2)
    return _Launch(rows=128 if head_dim <= 128 else 64, num_warps=8, num_stages=2)


class _Kernel:
    """The kernel for one geometry, as both kinds of work launch it."""

    def __init__(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> None:
        self.num_kv_heads, self.group = num_kv_heads, num_heads // num_kv_heads
        self.head_dim, self._block_size = head_dim, block_size
        self._keys = _keys(head_dim, dtype)
        assert SPLIT % self._keys == 0

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        out: Tensor,
        *,
        items: Tensor,
        num_items: Tensor,
        programs: int,
        partials: tuple[Tensor, Tensor, Tensor, Tensor] | None,
        launch: _Launch,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Tensor | None,
    ) -> None:
        """Attend the items with so many programs for each KV head. `partials`: scratch memory of decode rows; None: the
        items are tiles of chunks."""
        assert q.stride()[1:] == (self.head_dim, 1)
        assert out.is_contiguous()
        assert k_cache.stride() == v_cache.stride()
        assert k_cache.stride()[1:] == (self.num_kv_heads * self.head_dim, self.head_dim, 1)
        partial_out, partial_highest, partial_sum, arrivals = partials or (out, out, out, num_items)
        invariant_attention_kernel[(self.num_kv_heads * programs,)](
            q,
            k_cache,
            v_cache,
            out,
            block_tables,
            items,
            num_items,
            partial_out,
            partial_highest,
            partial_sum,
            arrivals,
            out if sinks is None else sinks,
            window or 0,
            scale * _LOG2_E,
            q.stride(0),
            block_tables.stride(0),
            NUM_KV_HEADS=self.num_kv_heads,
            GROUP=self.group,
            HEAD_DIM=self.head_dim,
            BLOCK_SIZE=self._block_size,
            BLOCK_STRIDE=k_cache.stride(0),
            HAS_WINDOW=window is not None,
            SOFT_CAP=0.0 if soft_cap is None else soft_cap * _LOG2_E,
            HAS_SINKS=sinks is not None,
            IS_DECODE=partials is not None,
            SPLIT=SPLIT,
            MAX_PARTIALS=MAX_PARTIALS,
            ROWS=launch.rows,
            KEYS=self._keys,
            ITEM_FIELDS=items.shape[1],
            NUM_STAGES=launch.num_stages,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )


class DecodeAttention:
    """Decode attention of one geometry: its work lists and scratch memory, allocated once for a run.

    Call `plan` each step, then `run` in each layer. Neither waits for the device or allocates anything, so both may be
    captured in a CUDA graph. Everything must be launched on one stream at a time: the scratch memory is shared.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        windows: Iterable[int | None],
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
    ) -> None:
        assert kv_dtype == dtype
        self._kernel = _Kernel(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
        )
        group = num_heads // num_kv_heads
        self._rows = max(16, triton.next_power_of_2(group))
        self._num_warps = 2 if head_dim <= 256 else 4
        self._lists = {
            window: SplitWorkList(window=window, num_kv_heads=num_kv_heads, max_rows=max_rows, device=device)
            for window in windows
        }
        shape = (MAX_PARTIALS + max_rows, num_kv_heads, group)
        self._partials = (
            torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.zeros(max_rows, num_kv_heads, dtype=torch.int32, device=device),
        )

    def plan(self, seq_lens: Tensor, slots: Tensor) -> None:
        """List the step's splits. seq_lens: [B] int32, keys of each row, 0 for padding; slots: [B] int64, the slot of
        each row, by which its block table is found."""
        for work_list in self._lists.values():
            work_list.plan(seq_lens, slots)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        out: Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend as planned. q, out: [B, H, D]; q's rows may be strided, out is contiguous; block_tables: [slots, ...]
        int32, of the layer's KV group; window: one of those that this was made for; sinks: [H] float32."""
        work_list = self._lists[window]
        self._kernel.run(
            q,
            k_cache,
            v_cache,
            block_tables,
            out,
            items=work_list.items,
            num_items=work_list.num_items,
            programs=work_list.num_programs(q.shape[0]),
            partials=self._partials,
            launch=_Launch(
                rows=self._rows, num_warps=4 if q.shape[0] <= _FEW_ROWS else self._num_warps, num_stages=_DECODE_STAGES
            ),
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
        )


class PrefillAttention:
    """Prefill attention of one geometry, for any window. Plan `tiles` each step, then call `run` in each layer.

    Neither waits for the device or allocates anything, so both may be captured in a CUDA graph. Geometries of equal
    `tile_key` may share their tiles.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert kv_dtype == dtype
        self._kernel = _Kernel(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
        )
        self._launch = _prefill_launch(head_dim, dtype, device)

    @property
    def tile_key(self) -> TileKey:
        """What its tiles are."""
        return TileKey(self._kernel.group, self._launch.rows)

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables: Tensor,
        tiles: PrefillTiles,
        out: Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Attend the tiles. q, out: [T, H, D], the chunks' tokens; q's may be strided, out is contiguous.
        block_tables: [slots, ...] int32, of the layer's KV group; sinks: [H] float32."""
        self._kernel.run(
            q,
            k_cache,
            v_cache,
            block_tables,
            out,
            items=tiles.tiles,
            num_items=tiles.num_tiles,
            programs=tiles.capacity,
            partials=None,
            launch=self._launch,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
        )
