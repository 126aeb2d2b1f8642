"""The wait for masks that processes on the host are still making.

One program of one warp for each row, which looks at the host's memory until the row's mask is there, and copies it to
the device. All rows of a step wait while it looks, so that it goes on without the mask once the wait has cost as much
as to compute the late rows again: the time that is allowed for each, times the number of those that are late by then.

Shapes: N rows; R masks of W words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = tl.constexpr(2048)
"""Words in flight from the host at a time."""


@triton.jit
def _last_look(flag, wanted, num_late_ptr, nanoseconds, ON_GPU: tl.constexpr):
    """Poll the number at `flag` [1] until it is `wanted` or later, or until the time for waiting is used up, and return
    it. Only the first thread polls, so that all threads see the same number. The interpreter looks once."""
    if ON_GPU:
        zeros = tl.zeros_like(flag).to(tl.int32)
        found = tl.inline_asm_elementwise(
            """{
                .reg .pred other, there, early;
                .reg .u32 thread, found, late;
                .reg .s32 left;
                .reg .u64 begun, now, limit;
                mov.u32 found, 0;
                mov.u32 thread, %laneid;
                setp.ne.u32 other, thread, 0;
                @other bra done;
                mov.u64 begun, %globaltimer;
                again:
                ld.acquire.sys.global.u32 found, [$1];
                sub.s32 left, found, $2;
                setp.ge.s32 there, left, 0;
                @there bra done;
                ld.relaxed.gpu.global.u32 late, [$3];
                mul.wide.u32 limit, late, $4;
                mov.u64 now, %globaltimer;
                sub.u64 now, now, begun;
                setp.lt.u64 early, now, limit;
                @early bra again;
                done:
                bar.warp.sync 0xffffffff;
                shfl.sync.idx.b32 $0, found, 0, 31, 0xffffffff;
            }""",
            "=r,l,r,l,r",
            [flag, wanted + zeros, num_late_ptr.to(tl.int64) + zeros.to(tl.int64), nanoseconds + zeros],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        found = tl.load(flag.to(tl.pointer_type(tl.int32)))
    return tl.max(found, axis=0)


@triton.jit(do_not_specialize=["num_rows"])
def _take_late_masks_kernel(
    masks_ptr,  # [R, W] int32, rows masks_stride apart; written
    made_ptr,  # [R, W] int32 on the host, rows made_stride apart
    answered_ptr,  # [R] int64 on the host
    mask_of_ptr,  # [N] int32, negative for rows without a mask
    wanted_ptr,  # [N] int32, 0 for masks that were there
    patience_ptr,  # [2] int32, late masks, counted down, and the nanoseconds for each
    out_ptr,  # [2, N] int32, written
    masks_stride,
    made_stride,
    num_words,
    num_rows,
    ON_GPU: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0)
    mask = tl.load(mask_of_ptr + row).to(tl.int64)
    wanted = tl.load(wanted_ptr + row)
    is_late = 0
    has_failed = 0
    if (mask >= 0) & (wanted != 0):
        flag = (answered_ptr + mask).to(tl.int64) + tl.arange(0, 1)  # its low half comes first
        found = _last_look(flag, wanted, patience_ptr, tl.load(patience_ptr + 1), ON_GPU)
        if found - wanted < 0:
            is_late = 1
        else:
            tl.atomic_add(patience_ptr, -1, sem="relaxed")
            has_failed = found & 1
            for start in range(0, num_words, _WORDS):
                word = start + tl.arange(0, _WORDS)
                inside = word < num_words
                # Volatile: not earlier than the look, and past the L1.
                made = tl.load(made_ptr + mask * made_stride + word, mask=inside, other=0, volatile=True)
                tl.store(masks_ptr + mask * masks_stride + word, made, mask=inside)
    tl.store(out_ptr + row, is_late)
    tl.store(out_ptr + num_rows + row, has_failed)


def take_late_masks(
    masks: Tensor, made: Tensor, answered: Tensor, mask_of: Tensor, wanted: Tensor, patience: Tensor
) -> Tensor:
    """Bring late masks as `nvcli.kernels.late_masks.take_late_masks` does."""
    num_rows = len(mask_of)
    out = torch.empty(2, num_rows, dtype=torch.int32, device=mask_of.device)
    if not num_rows:
        return out
    assert masks.stride(1) == made.stride(1) == 1
    _take_late_masks_kernel[(num_rows,)](
        masks,
        made,
        answered,
        mask_of,
        wanted,
        patience,
        out,
        masks.stride(0),
        made.stride(0),
        masks.shape[1],
        num_rows,
        ON_GPU=masks.is_cuda,
        num_warps=1,
    )
    return out
