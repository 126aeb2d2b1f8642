"""Masks that are not made yet when the kernels are launched that need them: the device waits for them by itself.

Processes on the host make masks, and say in memory that the device reads too which of them are there. CUDA tensors take
the Triton kernel. The plain torch below does the same without waiting, for tensors that all lie on the host.
Shapes: N rows of logits; R masks of W words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel


@with_kernel("sampling.late_masks")
def take_late_masks(
    masks: Tensor, made: Tensor, answered: Tensor, mask_of: Tensor, wanted: Tensor, patience: Tensor
) -> Tensor:
    """Bring masks that were late, and say of each row whether its mask is still late, and whether it has failed.

    masks: [R, W] int32, written; made: [R, W] int32, those of the processes on the host; answered: [R] int64, on the
    host, how far they are, an odd number for a mask that has failed; mask_of: [N] int32, the mask of each row, or a
    negative number for none; wanted: [N] int32, what a row's mask waits for, `answered` to reach it, or 0 where the
    mask was there before; patience: [2] int32, how many masks are late, which is counted down, and the nanoseconds to
    wait for each of those. Returns [2, N] int32, 1 for rows whose masks are late, and 1 for those that have failed.

    The memory on the host must be known to the driver. Nothing waits for the device, so that a graph can hold the call.
    """
    found = answered[mask_of.long().clamp(min=0)].int()
    is_awaited = (mask_of >= 0) & (wanted != 0)
    is_late = is_awaited & (found - wanted < 0)
    rows = mask_of[is_awaited & ~is_late].long()
    masks[rows] = made[rows]
    return torch.stack([is_late, is_awaited & ~is_late & (found & 1 > 0)]).int()
