"""Sums over the ranks of a group through memory that each may read and write, fused with what follows a sum.

One program for each row. A rank's part of row r lies in its own memory, finished by the kernel before. Programs tell
each other so by flags: a word of every (row, writing rank) in the memory of the rank that waits for it. A row's *epoch*
is the number of sums it took part in, kept on the device by each rank and alike on all of them; a flag holds the
writer's epoch, only ever grows, and "at least mine" is what is waited for. Programs of lower rows start first on every
rank and say their word before they wait for another's, so that those that run can finish.

Kernels get the ranks' matrices as a tuple of pointers, which lie among their arguments: nothing has to be looked up
once the wait is over. Where the flags of each rank lie is in tables of int64 addresses, [ranks] each.

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


_SET = """{
    .reg .pred first;
    .reg .u32 thread;
    mov.u32 thread, %tid.x;
    setp.lt.u32 first, thread, 32;
    @first st.ORDER.sys.global.u32 [$1], $2;
    mov.u32 $0, 0;
}"""
_SET_RELEASED = tl.constexpr(_SET.replace("ORDER", "release"))
_SET_RELAXED = tl.constexpr(_SET.replace("ORDER", "relaxed"))


@triton.jit
def _signal(addresses, epoch, RELEASE: tl.constexpr, ON_GPU: tl.constexpr):
    """Set the flags at `addresses` [R] int64. With RELEASE all that this program wrote before is visible to whoever
    sees them; without, what kernels before this one wrote: they have finished, and it lies in this GPU's L2, where
    others read it. One warp does it: a warp holds any tensor of up to 32 elements whole."""
    if ON_GPU:
        words = epoch + tl.zeros_like(addresses).to(tl.int32)
        if RELEASE:
            tl.debug_barrier()
        tl.inline_asm_elementwise(
            _SET_RELEASED if RELEASE else _SET_RELAXED,
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
    """Until the flags at `addresses` [R] int64 are `epoch` or later; one warp looks, and all of the program waits for
    it. Interpreted, they have to be so already."""
    if ON_GPU:
        words = epoch + tl.zeros_like(addresses).to(tl.int32)
        tl.inline_asm_elementwise(
            """{
                .reg .pred other, early;
                .reg .u32 thread, found;
                mov.u32 thread, %tid.x;
                setp.ge.u32 other, thread, 32;
                @other bra done;
                again:
                ld.acquire.sys.global.u32 found, [$1];
                sub.s32 found, found, $2;
                setp.lt.s32 early, found, 0;
                @early bra again;
                done:
                mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [addresses, words],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()
    else:
        found = tl.load(addresses.to(tl.pointer_type(tl.int32)))
        tl.device_assert(tl.min(found - epoch) >= 0)


@triton.jit
def _sum_of_parts(parts, row_start, columns, inside, NUM_RANKS: tl.constexpr):
    total = tl.zeros_like(columns).to(tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        # Past the L1: another rank wrote it, and it is read once.
        part = tl.load(parts[rank] + row_start + columns, mask=inside, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    return total


@triton.jit
def _normed(x, weight, eps, SIZE: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight


@triton.jit(do_not_specialize=["rank"])
def _one_shot_kernel(
    parts,
    flags_ptr,
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
    row = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, NUM_RANKS)
    epoch = tl.load(epochs_ptr + row) + 1
    flags_of_row = row * (NUM_RANKS * 4)
    _signal(tl.load(flags_ptr + ranks) + flags_of_row + rank * 4, epoch, False, ON_GPU)
    row_start = row * SIZE
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weight = columns.to(tl.float32)
    residual = weight
    if NORM:  # on their way while others are waited for
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + row_start + columns, mask=inside, other=0.0).to(tl.float32)
    _wait(tl.load(flags_ptr + rank) + flags_of_row + ranks * 4, epoch, ON_GPU)
    x = _sum_of_parts(parts, row_start, columns, inside, NUM_RANKS)
    if NORM:
        total = (x + residual).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row_start + columns, total, mask=inside)
        x = _normed(total.to(tl.float32), weight, eps, SIZE)
    tl.store(out_ptr + row_start + columns, x.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(epochs_ptr + row, epoch)


@triton.jit(do_not_specialize=["rank"])
def _two_shot_kernel(
    parts,
    outs,
    flags_ptr,
    done_ptr,
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
    row = tl.program_id(0).to(tl.int64)
    owner = row % NUM_RANKS
    ranks = tl.arange(0, NUM_RANKS)
    epoch = tl.load(epochs_ptr + row) + 1
    flags_of_row = row * (NUM_RANKS * 4)
    # The owner tells itself too, which saves an exception.
    _signal(tl.load(flags_ptr + owner) + flags_of_row + rank * 4 + ranks * 0, epoch, False, ON_GPU)
    if owner == rank:
        row_start = row * SIZE
        columns = tl.arange(0, BLOCK)
        inside = columns < SIZE
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + row_start + columns, mask=inside, other=0.0).to(tl.float32)
        done = tl.load(done_ptr + ranks) + row * 4
        _wait(tl.load(flags_ptr + rank) + flags_of_row + ranks * 4, epoch, ON_GPU)
        total = _sum_of_parts(parts, row_start, columns, inside, NUM_RANKS) + residual
        total = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row_start + columns, total, mask=inside)
        normed = _normed(total.to(tl.float32), weight, eps, SIZE).to(residual_ptr.dtype.element_ty)
        for peer in tl.static_range(NUM_RANKS):
            tl.store(outs[peer] + row_start + columns, normed, mask=inside)
        _signal(done, epoch, True, ON_GPU)
    else:
        _wait(tl.load(done_ptr + rank) + row * 4 + ranks * 0, epoch, ON_GPU)
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
    words_ptr,
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
        addresses = tl.load(words_ptr + peer) + (rows * NUM_RANKS + rank) * 16
        _put(addresses, low, inside, ON_GPU)
        _put(addresses + 8, high, inside, ON_GPU)
    best = key
    for peer in tl.static_range(NUM_RANKS):
        addresses = tl.load(words_ptr + rank) + (rows * NUM_RANKS + peer) * 16
        low = _take(addresses, epoch, inside, ON_GPU).to(tl.int64) & 0xFFFFFFFF
        high = _take(addresses + 8, epoch, inside, ON_GPU).to(tl.int64)
        best = tl.maximum(best, (high << 32) | low)
    tl.store(out_ptr + rows, best, mask=inside)
    tl.store(epochs_ptr + rows, epoch, mask=inside)


def one_shot(
    parts: tuple[Tensor, ...],
    flags: Tensor,
    epochs: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    eps: float,
    rank: int,
) -> None:
    """The sum of all ranks' `parts` into `out` [T, H]; with a residual [T, H] it is added to that, in place, and `out`
    is the norm of the result. parts: [at least T, H] of each rank; epochs: [at least T] int32."""
    num_rows, size = out.shape
    assert out.is_contiguous()
    assert residual is None or (residual.is_contiguous() and residual.shape == out.shape)
    block = triton.next_power_of_2(size)
    _one_shot_kernel[(num_rows,)](
        parts,
        flags,
        epochs,
        out if residual is None else residual,
        out if weight is None else weight,
        out,
        eps,
        rank,
        NUM_RANKS=len(parts),
        SIZE=size,
        BLOCK=block,
        NORM=residual is not None,
        ON_GPU=out.is_cuda,
        num_warps=_num_warps(block),
    )


def two_shot(
    parts: tuple[Tensor, ...],
    outs: tuple[Tensor, ...],
    flags: Tensor,
    done: Tensor,
    epochs: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    rank: int,
) -> None:
    """As `one_shot` with a residual, but the result goes to `outs` of all ranks, and only the rows of `residual` that
    this rank owns (those with row % ranks == rank) are read and updated."""
    num_rows, size = residual.shape
    assert residual.is_contiguous()
    block = triton.next_power_of_2(size)
    _two_shot_kernel[(num_rows,)](
        parts,
        outs,
        flags,
        done,
        epochs,
        residual,
        weight,
        eps,
        rank,
        NUM_RANKS=len(parts),
        SIZE=size,
        BLOCK=block,
        ON_GPU=residual.is_cuda,
        num_warps=_num_warps(block),
    )


def max_of_keys(keys: Tensor, words: Tensor, epochs: Tensor, rank: int) -> Tensor:
    """The largest of all ranks' keys, row by row: [N] int64 → [N] int64. words: each rank's [at least N, ranks, 2]."""
    out = torch.empty_like(keys)
    _max_kernel[(triton.cdiv(len(keys), _KEY_ROWS),)](
        keys,
        out,
        words,
        epochs,
        len(keys),
        rank,
        NUM_RANKS=len(words),
        ROWS=_KEY_ROWS,
        ON_GPU=keys.is_cuda,
        num_warps=1,
    )
    return out


def _num_warps(block: int) -> int:
    return min(max(block // (32 * _THREAD_ELEMENTS), 1), 16)
