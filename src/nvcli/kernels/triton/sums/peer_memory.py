"""Sums over the ranks of a group through memory that each may read and write, fused with what follows a sum.

A program takes a row, or with two shots a row of each owner. A rank's part of row r lies in its own memory, finished by
the kernel before. Programs tell each other so by flags: a word of every (row, writing rank) in the memory of the rank
that waits for it. A row's *epoch* is the number of sums it took part in, kept on the device by each rank and alike on
all of them; a flag holds the writer's epoch and only grows, and a program waits until it is at least the program's own.
Programs of lower rows start first on every rank, and each sets its flags before it waits for others, so that the
programs that run can finish.

Kernels get the ranks' matrices as a tuple of pointers, which lie among their arguments: nothing has to be looked up
once the wait is over. Where the flags of each rank lie is in tables of int64 addresses, [ranks] each.

A sum takes *one shot*, in which every rank reads all parts, or *two shots*, in which each row's owner sums it and
writes the result to all ranks; TensorRT-LLM's and vLLM's all-reduce kernels have the same two. Parts are added in the
order of ranks, in float32, so that all ranks get the same bits, by either way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.triton.elementwise.fp8 import store_row
from nvcli.kernels.weight_formats import FP8_BLOCK
from nvcli.kernels.whole_numbers import ceil_div, next_power_of_2, warps_of_row

_KEY_ROWS = tl.constexpr(32)
"""The rows of one program of `max_of_keys`: one for each lane of its only warp."""

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
def _signal(addresses, epochs, RELEASE: tl.constexpr, ON_GPU: tl.constexpr):
    """Set the flags at `addresses` [R] int64 to `epochs` [R] int32. With RELEASE all that this program wrote before is
    visible to whoever sees them; without, what kernels before this one wrote: they have finished, and it lies in this
    GPU's L2, where others read it. One warp does it: a warp holds any tensor of up to 32 elements whole."""
    if ON_GPU:
        if RELEASE:
            tl.debug_barrier()
        tl.inline_asm_elementwise(
            _SET_RELEASED if RELEASE else _SET_RELAXED,
            "=r,l,r",
            [addresses, epochs],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(addresses.to(tl.pointer_type(tl.int32)), epochs)


@triton.jit
def _wait(addresses, epochs, ON_GPU: tl.constexpr):
    """Wait until the flags at `addresses` [R] int64 are `epochs` [R] int32 or later. One warp looks, and the whole
    program waits for it. In the interpreter they must be so already."""
    if ON_GPU:
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
            [addresses, epochs],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()
    else:
        found = tl.load(addresses.to(tl.pointer_type(tl.int32)))
        tl.device_assert(tl.min(found - epochs) >= 0)


@triton.jit
def _sum_of_parts(parts, row_start, columns, inside, NUM_RANKS: tl.constexpr):
    """Sum the ranks' parts of the row that begins at element `row_start`: columns [BLOCK] → [BLOCK] float32."""
    total = tl.zeros_like(columns).to(tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        # Past the L1: another rank wrote it, and it is read once.
        part = tl.load(parts[rank] + row_start + columns, mask=inside, other=0.0, cache_modifier=".cg")
        total += part.to(tl.float32)
    return total


@triton.jit
def _normed(x, weight, eps, SIZE: tl.constexpr):
    """Norm one row: x, weight: [BLOCK] float32, 0 behind SIZE → [BLOCK] float32."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight


@triton.jit(do_not_specialize=["rank"])
def _one_shot_kernel(
    parts,  # a tuple with each rank's [T, SIZE]
    flags_ptr,  # [NUM_RANKS] int64, addresses of each rank's flags [T, NUM_RANKS] int32
    epochs_ptr,  # [T] int32, advanced
    residual_ptr,  # [T, SIZE], updated; None: the sum is not normed
    weight_ptr,  # [SIZE], with a residual
    out_ptr,  # [T, SIZE], written
    scales_ptr,  # see `store_row`
    eps,
    rank,
    NUM_RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_GROUPS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Program (row). Every rank reads all parts of every row. out = sum; with a residual: residual += sum and
    out = norm(residual) × weight."""
    row = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, NUM_RANKS)
    epoch = tl.load(epochs_ptr + row) + 1
    epochs = epoch + tl.zeros_like(ranks)
    flags_of_row = row * (NUM_RANKS * 4)
    _signal(tl.load(flags_ptr + ranks) + flags_of_row + rank * 4, epochs, False, ON_GPU)
    row_start = row * SIZE
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    weight = columns.to(tl.float32)
    residual = weight
    if residual_ptr is not None:  # on their way while others are waited for
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + row_start + columns, mask=inside, other=0.0).to(tl.float32)
    _wait(tl.load(flags_ptr + rank) + flags_of_row + ranks * 4, epochs, ON_GPU)
    x = _sum_of_parts(parts, row_start, columns, inside, NUM_RANKS)
    dtype: tl.constexpr = parts[0].dtype.element_ty
    if residual_ptr is not None:
        total = (x + residual).to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row_start + columns, total, mask=inside)
        x = _normed(total.to(tl.float32), weight, eps, SIZE)
    store_row(x.to(dtype), row, out_ptr, scales_ptr, SIZE, BLOCK, BY_GROUPS)
    tl.store(epochs_ptr + row, epoch)


@triton.jit(do_not_specialize=["rank", "num_rows"])
def _two_shot_kernel(
    parts,  # a tuple with each rank's [T, SIZE]
    outs,  # a tuple with each rank's [T, SIZE], written
    scales,  # a tuple with each rank's, or with None for each: see `store_row`
    flags_ptr,  # [NUM_RANKS] int64, addresses of each rank's flags [T, NUM_RANKS] int32
    done_ptr,  # [NUM_RANKS] int64, addresses of each rank's [T] int32
    epochs_ptr,  # [T] int32, advanced
    residual_ptr,  # [T, SIZE], updated in the rows that this rank owns
    weight_ptr,  # [SIZE]
    eps,
    rank,
    num_rows,
    NUM_RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BY_GROUPS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Program (NUM_RANKS rows, one of each owner). Rank r % NUM_RANKS owns row r: it alone reads the row's parts, keeps
    its residual, and writes the normed sum to all ranks' memory. A program tells the owners that its rank's parts are
    there, sums its own row, and waits for the results of the others."""
    ranks = tl.arange(0, NUM_RANKS)
    first = tl.program_id(0).to(tl.int64) * NUM_RANKS
    rows = tl.minimum(first + ranks, num_rows - 1)  # the last one stands for those that there are not
    epochs = tl.load(epochs_ptr + rows) + 1
    # An owner tells itself too, which saves an exception.
    _signal(tl.load(flags_ptr + rows % NUM_RANKS) + (rows * NUM_RANKS + rank) * 4, epochs, False, ON_GPU)
    row = first + rank
    if row < num_rows:
        row_start = row * SIZE
        columns = tl.arange(0, BLOCK)
        inside = columns < SIZE
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + row_start + columns, mask=inside, other=0.0).to(tl.float32)
        done = tl.load(done_ptr + ranks) + row * 4
        epochs_of_row = tl.load(epochs_ptr + row) + 1 + tl.zeros_like(ranks)
        _wait(tl.load(flags_ptr + rank) + (row * NUM_RANKS + ranks) * 4, epochs_of_row, ON_GPU)
        total = _sum_of_parts(parts, row_start, columns, inside, NUM_RANKS) + residual
        total = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row_start + columns, total, mask=inside)
        normed = _normed(total.to(tl.float32), weight, eps, SIZE).to(residual_ptr.dtype.element_ty)
        for peer in tl.static_range(NUM_RANKS):
            store_row(normed, row, outs[peer], scales[peer], SIZE, BLOCK, BY_GROUPS)
        _signal(done, epochs_of_row, True, ON_GPU)
    _wait(tl.load(done_ptr + rank) + rows * 4, epochs, ON_GPU)
    tl.store(epochs_ptr + rows, epochs)


@triton.jit
def _put(addresses, words, inside, ON_GPU: tl.constexpr):
    """Write words [R] int64, each in one piece, to `addresses` [R] int64 where `inside` [R] holds."""
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
    """Wait until the upper halves of the words at `addresses` [R] int64 are `epoch` [R] int32; return the lower halves
    [R] int32."""
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
    keys_ptr,  # [num_rows] int64
    out_ptr,  # [num_rows] int64, written
    words_ptr,  # [NUM_RANKS] int64, addresses of each rank's words [max_rows, 2, NUM_RANKS, 2] int64
    epochs_ptr,  # [max_rows] int32, advanced
    num_rows,
    rank,
    NUM_RANKS: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Program (_KEY_ROWS rows). Each key goes to every rank as two words, each with half of the key and the epoch. The
    epoch shows that a word has arrived, without a flag or a fence (as in NCCL's LL protocol). Even and odd epochs have
    places of their own: a rank that runs ahead must not overwrite what a slower one is yet to read."""
    rows = tl.program_id(0).to(tl.int64) * _KEY_ROWS + tl.arange(0, _KEY_ROWS)
    inside = rows < num_rows
    epoch = tl.load(epochs_ptr + rows, mask=inside, other=0) + 1
    key = tl.load(keys_ptr + rows, mask=inside, other=0)
    stamp = epoch.to(tl.int64) << 32
    low = stamp | (key & 0xFFFFFFFF)
    high = stamp | ((key >> 32) & 0xFFFFFFFF)
    place = (rows * 2 + (epoch & 1)) * NUM_RANKS
    for peer in tl.static_range(NUM_RANKS):
        addresses = tl.load(words_ptr + peer) + (place + rank) * 16
        _put(addresses, low, inside, ON_GPU)
        _put(addresses + 8, high, inside, ON_GPU)
    best = key
    for peer in tl.static_range(NUM_RANKS):
        addresses = tl.load(words_ptr + rank) + (place + peer) * 16
        low = _take(addresses, epoch, inside, ON_GPU).to(tl.int64) & 0xFFFFFFFF
        high = _take(addresses + 8, epoch, inside, ON_GPU).to(tl.int64)
        best = tl.maximum(best, (high << 32) | low)
    tl.store(out_ptr + rows, best, mask=inside)
    tl.store(epochs_ptr + rows, epoch, mask=inside)


def add_rms_norm(
    parts: tuple[Tensor, ...],
    outs: Sequence[Activations] | None,
    flags: Tensor,
    done: Tensor,
    epochs: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Activations,
    eps: float,
    rank: int,
) -> None:
    """Sum all ranks' `parts` into `out` [T, H]. With a residual [T, H] and a weight [H], the sum is added to the
    residual, in place, and `out` is the norm of the result, which may be quantised.

    With `outs` it takes two shots: the result is written to these, [at least T, H] of each rank, of which `out` is this
    rank's, and only the rows of `residual` that this rank owns (with row % ranks == rank) are read and updated. parts:
    [at least T, H] of each rank; flags, done: [ranks] int64 addresses; epochs: [at least T] int32.
    """
    num_rows, size = out.shape
    result, scales = _targets(out)
    assert result.is_contiguous()
    assert residual is None or (residual.is_contiguous() and residual.shape == out.shape)
    by_groups = scales is not None and scales.dim() == 2
    block = max(next_power_of_2(size), FP8_BLOCK if by_groups else 1)
    constants = {
        "NUM_RANKS": len(parts),
        "SIZE": size,
        "BLOCK": block,
        "BY_GROUPS": by_groups,
        "ON_GPU": result.is_cuda,
        "num_warps": warps_of_row(block),
    }
    if outs is not None:
        results, all_scales = zip(*map(_targets, outs), strict=True)
        _two_shot_kernel[(ceil_div(num_rows, len(parts)),)](
            parts, results, all_scales, flags, done, epochs, residual, weight, eps, rank, num_rows, **constants
        )
        return
    _one_shot_kernel[(num_rows,)](
        parts,
        flags,
        epochs,
        residual,
        weight,
        result,
        scales,
        eps,
        rank,
        **constants,
    )


def _targets(out: Activations) -> tuple[Tensor, Tensor | None]:
    """Return what is written: a result and no scales, or codes and scales."""
    return (out, None) if isinstance(out, Tensor) else (out.codes, out.scales)


def max_of_keys(keys: Tensor, words: Tensor, epochs: Tensor, rank: int) -> Tensor:
    """Find the largest of all ranks' keys, row by row: [N] int64 → [N] int64. words: [ranks] int64, the addresses of
    each rank's words [at least N, 2, ranks, 2] int64; epochs: [at least N] int32."""
    out = torch.empty_like(keys)
    _max_kernel[(ceil_div(len(keys), _KEY_ROWS.value),)](
        keys, out, words, epochs, len(keys), rank, NUM_RANKS=len(words), ON_GPU=keys.is_cuda, num_warps=1
    )
    return out
