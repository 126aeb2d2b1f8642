"""Sums over the ranks of a group through memory that each may read and write, fused with what follows a sum.

One program for each row. A rank's part of row r lies in its own memory, finished by the kernel before. Programs tell
each other so by flags: a word of every (row, writing rank) in the memory of the rank that waits for it. A row's *epoch*
is the number of sums it took part in, kept on the device by each rank and alike on all of them; a flag holds the
writer's epoch, only ever grows, and "at least mine" is what is waited for. Programs of lower rows start first on every
rank and say their word before they wait for another's, so that those that run can finish.

Addresses of peers are int64 numbers in a table: `peers[k] + offset` is the same thing on rank k for every offset.

Parts are added in the order of ranks, in float32, so that all ranks get the same bits, by either way of summing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_THREAD_ELEMENTS = 16
_KEY_ROWS = 32
"""Of one program of `max_of_keys`: a row for each lane of its one warp."""


@triton.jit
def _signal(addresses, epoch, RELEASE: tl.constexpr, ON_GPU: tl.constexpr):
    """Set the flags at `addresses` [R] int64. With RELEASE all that this program wrote before is visible to whoever
    sees them; without, what kernels before this one wrote: they have finished, and lie in the memory's own cache."""
    if ON_GPU:
        words = epoch + tl.zeros_like(addresses).to(tl.int32)
        if RELEASE:
            tl.debug_barrier()
            tl.inline_asm_elementwise(
                "st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0;",
                "=r,l,r",
                [addresses, words],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            tl.inline_asm_elementwise(
                "st.relaxed.sys.global.u32 [$1], $2; mov.u32 $0, 0;",
                "=r,l,r",
                [addresses, words],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
    else:
        tl.store(addresses.to(tl.pointer_type(tl.int32)), epoch)


@triton.jit
def _wait(addresses, epoch, ON_GPU: tl.constexpr):
    """Until the flags at `addresses` [R] int64 are `epoch` or later. Interpreted, they have to be so already."""
    if ON_GPU:
        words = epoch + tl.zeros_like(addresses).to(tl.int32)
        tl.inline_asm_elementwise(
            """{
                .reg .pred early;
                .reg .u32 found;
                again:
                ld.acquire.sys.global.u32 found, [$1];
                sub.s32 found, found, $2;
                setp.lt.s32 early, found, 0;
                @early bra again;
                mov.u32 $0, found;
            }""",
            "=r,l,r",
            [addresses, words],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()  # each thread waited for some of the flags
    else:
        found = tl.load(addresses.to(tl.pointer_type(tl.int32)))
        tl.device_assert(tl.min(found - epoch) >= 0)


@triton.jit
def _row_pointer(peers_ptr, rank, offset, row, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Row `row` of the matrix at `offset` in the memory of `rank`."""
    base = (tl.load(peers_ptr + rank) + offset).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(base, 16) + row * SIZE


@triton.jit
def _sum_of_parts(
    peers_ptr, offset, row, columns, inside, SIZE: tl.constexpr, NUM_RANKS: tl.constexpr, DTYPE: tl.constexpr
):
    total = tl.zeros_like(columns).to(tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        part_ptr = _row_pointer(peers_ptr, rank, offset, row, SIZE, DTYPE)
        # Past the L1: another rank wrote it, and it is read once.
        total += tl.load(part_ptr + columns, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit
def _normed(x, weight, eps, SIZE: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight


@triton.jit(do_not_specialize=["rank"])
def _one_shot_kernel(
    peers_ptr,
    part_offset,
    flags_offset,
    epochs_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    eps,
    rank,
    NUM_RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Every rank reads all parts of every row. out = sum; with NORM: residual += sum, out = norm(residual) × weight."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    ranks = tl.arange(0, NUM_RANKS)
    epoch = tl.load(epochs_ptr + row) + 1
    flags_of_row = flags_offset + row * (NUM_RANKS * 4)
    _signal(tl.load(peers_ptr + ranks) + flags_of_row + rank * 4, epoch, False, ON_GPU)
    weight = columns.to(tl.float32)
    residual = weight
    if NORM:  # on their way while others are waited for
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    _wait(tl.load(peers_ptr + rank) + flags_of_row + ranks * 4, epoch, ON_GPU)
    x = _sum_of_parts(peers_ptr, part_offset, row, columns, inside, SIZE, NUM_RANKS, DTYPE)
    if NORM:
        total = (x + residual).to(DTYPE)
        tl.store(residual_ptr + row * SIZE + columns, total, mask=inside)
        x = _normed(total.to(tl.float32), weight, eps, SIZE)
    tl.store(out_ptr + row * SIZE + columns, x.to(DTYPE), mask=inside)
    tl.store(epochs_ptr + row, epoch)


@triton.jit(do_not_specialize=["rank"])
def _two_shot_kernel(
    peers_ptr,
    part_offset,
    out_offset,
    flags_offset,
    done_offset,
    epochs_ptr,
    residual_ptr,
    weight_ptr,
    eps,
    rank,
    NUM_RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Rank r % NUM_RANKS owns row r: it alone reads the row's parts, keeps its residual, and writes the normed sum to
    all ranks' memory; the others tell it when their part is there, and wait for its word."""
    DTYPE: tl.constexpr = residual_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    owner = row % NUM_RANKS
    ranks = tl.arange(0, NUM_RANKS)
    epoch = tl.load(epochs_ptr + row) + 1
    flags_of_row = flags_offset + row * (NUM_RANKS * 4)
    done_of_row = done_offset + row * 4
    if owner == rank:
        columns = tl.arange(0, BLOCK)
        inside = columns < SIZE
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + row * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        # Its own flag too, which saves telling it from the others.
        own_flags = tl.load(peers_ptr + rank) + flags_of_row + ranks * 4
        _signal(tl.load(peers_ptr + rank) + flags_of_row + rank * 4 + ranks * 0, epoch, False, ON_GPU)
        _wait(own_flags, epoch, ON_GPU)
        x = _sum_of_parts(peers_ptr, part_offset, row, columns, inside, SIZE, NUM_RANKS, DTYPE)
        total = (x + residual).to(DTYPE)
        tl.store(residual_ptr + row * SIZE + columns, total, mask=inside)
        normed = _normed(total.to(tl.float32), weight, eps, SIZE).to(DTYPE)
        for peer in tl.static_range(NUM_RANKS):
            tl.store(_row_pointer(peers_ptr, peer, out_offset, row, SIZE, DTYPE) + columns, normed, mask=inside)
        _signal(tl.load(peers_ptr + ranks) + done_of_row, epoch, True, ON_GPU)
    else:
        _signal(tl.load(peers_ptr + owner) + flags_of_row + rank * 4 + ranks * 0, epoch, False, ON_GPU)
        _wait(tl.load(peers_ptr + rank) + done_of_row + ranks * 0, epoch, ON_GPU)
    tl.store(epochs_ptr + row, epoch)


@triton.jit
def _put(addresses, words, inside, ON_GPU: tl.constexpr):
    """Words [R] int64, each written as one, to `addresses` [R] int64 as far as `inside`."""
    if ON_GPU:
        tl.inline_asm_elementwise(
            """{
                .reg .pred put;
                setp.ne.u32 put, $3, 0;
                @put st.relaxed.sys.global.u64 [$1], $2;
                mov.u32 $0, 0;
            }""",
            "=r,l,l,r",
            [addresses, words, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(addresses.to(tl.pointer_type(tl.int64)), words, mask=inside)


@triton.jit
def _take(addresses, epoch, inside, ON_GPU: tl.constexpr):
    """The lower halves [R] int32 of the words at `addresses`, once their upper halves are `epoch` [R] int32."""
    if ON_GPU:
        half = tl.inline_asm_elementwise(
            """{
                .reg .pred absent, early;
                .reg .u64 word;
                .reg .u32 stamp, half;
                mov.u32 half, 0;
                setp.eq.u32 absent, $3, 0;
                @absent bra done;
                again:
                ld.relaxed.sys.global.u64 word, [$1];
                mov.b64 {half, stamp}, word;
                setp.ne.u32 early, stamp, $2;
                @early bra again;
                done:
                mov.u32 $0, half;
            }""",
            "=r,l,r,r",
            [addresses, epoch, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        words = tl.load(addresses.to(tl.pointer_type(tl.int64)), mask=inside, other=0)
        tl.device_assert(tl.max((((words >> 32).to(tl.int32) != epoch) & inside).to(tl.int32), axis=0) == 0)
        half = words.to(tl.int32)
    return half


@triton.jit(do_not_specialize=["rank", "num_rows"])
def _max_kernel(
    keys_ptr,
    out_ptr,
    peers_ptr,
    words_offset,
    epochs_ptr,
    num_rows,
    rank,
    NUM_RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Each key goes to every rank as two words that hold half of it and the epoch: what has arrived shows by itself,
    and needs no flag and no fence (as NCCL's LL protocol does it)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    epoch = tl.load(epochs_ptr + rows, mask=inside, other=0) + 1
    key = tl.load(keys_ptr + rows, mask=inside, other=0)
    stamp = epoch.to(tl.int64) << 32
    low = stamp | (key & 0xFFFFFFFF)
    high = stamp | ((key >> 32) & 0xFFFFFFFF)
    for peer in tl.static_range(NUM_RANKS):
        addresses = tl.load(peers_ptr + peer) + words_offset + (rows * NUM_RANKS + rank) * 16
        _put(addresses, low, inside, ON_GPU)
        _put(addresses + 8, high, inside, ON_GPU)
    best = key
    for peer in tl.static_range(NUM_RANKS):
        addresses = tl.load(peers_ptr + rank) + words_offset + (rows * NUM_RANKS + peer) * 16
        low = _take(addresses, epoch, inside, ON_GPU).to(tl.int64) & 0xFFFFFFFF
        high = _take(addresses + 8, epoch, inside, ON_GPU).to(tl.int64)
        best = tl.maximum(best, (high << 32) | low)
    tl.store(out_ptr + rows, best, mask=inside)
    tl.store(epochs_ptr + rows, epoch, mask=inside)


def one_shot(
    peers: Tensor,
    epochs: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    eps: float,
    *,
    rank: int,
    part_offset: int,
    flags_offset: int,
) -> None:
    """The sum of all ranks' [T, H] at `part_offset` into `out` [T, H]; with a residual [T, H] it is added to that, in
    place, and `out` is the norm of the result. peers: [ranks] int64; epochs: [at least T] int32."""
    num_rows, size = out.shape
    assert out.is_contiguous()
    assert residual is None or (residual.is_contiguous() and residual.shape == out.shape)
    block = triton.next_power_of_2(size)
    _one_shot_kernel[(num_rows,)](
        peers,
        part_offset,
        flags_offset,
        epochs,
        out if residual is None else residual,
        out if weight is None else weight,
        out,
        eps,
        rank,
        NUM_RANKS=len(peers),
        SIZE=size,
        BLOCK=block,
        NORM=residual is not None,
        ON_GPU=out.is_cuda,
        num_warps=_num_warps(block),
    )


def two_shot(
    peers: Tensor,
    epochs: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    rank: int,
    part_offset: int,
    out_offset: int,
    flags_offset: int,
    done_offset: int,
) -> None:
    """As `one_shot` with a residual, but the result goes to `out_offset` of every rank's memory, and only the rows of
    `residual` that this rank owns (those with row % ranks == rank) are read and updated."""
    num_rows, size = residual.shape
    assert residual.is_contiguous()
    block = triton.next_power_of_2(size)
    _two_shot_kernel[(num_rows,)](
        peers,
        part_offset,
        out_offset,
        flags_offset,
        done_offset,
        epochs,
        residual,
        weight,
        eps,
        rank,
        NUM_RANKS=len(peers),
        SIZE=size,
        BLOCK=block,
        ON_GPU=residual.is_cuda,
        num_warps=_num_warps(block),
    )


def max_of_keys(keys: Tensor, peers: Tensor, epochs: Tensor, *, rank: int, words_offset: int) -> Tensor:
    """The largest of all ranks' keys, row by row: [N] int64 → [N] int64."""
    out = torch.empty_like(keys)
    _max_kernel[(triton.cdiv(len(keys), _KEY_ROWS),)](
        keys,
        out,
        peers,
        words_offset,
        epochs,
        len(keys),
        rank,
        NUM_RANKS=len(peers),
        ROWS=_KEY_ROWS,
        ON_GPU=keys.is_cuda,
        num_warps=1,
    )
    return out


def _num_warps(block: int) -> int:
    return min(max(block // (32 * _THREAD_ELEMENTS), 1), 16)
