"""Masks of the tokens that may be chosen: a bit for each token of the vocabulary.

CUDA tensors take the Triton kernel, others the plain torch below, which is the definition that the kernel is held to.
Shapes: N rows of logits; M tokens; R masks of W words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel


@with_kernel("sampling.token_mask")
def apply_token_mask(logits: Tensor, masks: Tensor, mask_of: Tensor, *, start: int = 0) -> None:
    """Set the logits of tokens that may not be chosen to -inf, in place.

    logits: [N, M] of the tokens `start` to `start + M`, rows may lie apart; masks: [R, W] int32, where bit t % 32 of
    word t // 32 says whether token t may be chosen, rows may lie apart; mask_of: [N] int32, the mask of each row, or a
    negative number: any token may be chosen. Tokens after a mask's last word may not. Nothing waits for the device, so
    that a graph can hold the call.
    """
    num_words = masks.shape[1]
    tokens = torch.arange(start, start + logits.shape[1])
    words = tokens >> 5
    rows = (mask_of >= 0).nonzero()[:, 0]
    bits = masks[mask_of[rows].long()][:, words.clamp(max=num_words - 1)] >> (tokens & 31)
    is_allowed = (bits & 1).bool() & (words < num_words)
    logits[rows] = logits[rows].masked_fill(~is_allowed, -torch.inf)
