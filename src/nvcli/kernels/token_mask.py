"""Masks of the tokens that may be chosen: a bit for each token of the vocabulary.

CUDA tensors take the Triton kernel, others the plain torch below, which is the definition that the kernel is held to.
Shapes: N rows of logits, of which n have masks; M tokens; W words of a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_token_mask(logits: Tensor, rows: Tensor, masks: Tensor, *, start: int = 0) -> None:
    """Set the logits of tokens that may not be chosen to -inf, in place.

    logits: [N, M] of the tokens `start` to `start + M`, rows may lie apart; rows: [n] int32, different rows of them;
    masks: [n, W] int32, where bit t % 32 of word t // 32 says whether token t may be chosen. Tokens behind the last
    word may not. Nothing waits for the device.
    """
    if logits.is_cuda:
        from nvcli.kernels.triton import token_mask

        token_mask.apply_token_mask(logits, rows, masks, start=start)
        return
    num_words = masks.shape[1]
    tokens = torch.arange(start, start + logits.shape[1])
    words = tokens >> 5
    bits = masks[:, words.clamp(max=num_words - 1)] >> (tokens & 31)
    is_allowed = (bits & 1).bool() & (words < num_words)
    at = rows.long()
    logits[at] = logits[at].masked_fill(~is_allowed, -torch.inf)
