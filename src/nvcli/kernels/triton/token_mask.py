"""Masks of the tokens that may be chosen, applied in one pass that writes what is forbidden and reads no logits.

Shapes: N rows of logits; M tokens `start` to `end`, the whole vocabulary or a shard of it; R masks of W words.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Tokens that one program looks at: 128 words of a mask, which its threads share through the cache."""


@triton.jit
def _apply_token_mask_kernel(
    logits_ptr,  # [N, M], rows logits_row_stride apart; written
    masks_ptr,  # [R, W] int32, rows masks_row_stride apart
    mask_of_ptr,  # [N] int32, negative for rows without a mask
    logits_row_stride,
    masks_row_stride,
    start,
    end,
    num_words,
    BLOCK: tl.constexpr,
):
    """Program (row, block) forbids the tokens of one block of a row."""
    row = tl.program_id(0).to(tl.int64)
    mask = tl.load(mask_of_ptr + row).to(tl.int64)
    if mask < 0:
        return
    tokens = start + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tokens < end
    words = tokens >> 5
    bits = tl.load(masks_ptr + mask * masks_row_stride + words, mask=inside & (words < num_words), other=0)
    is_forbidden = ((bits >> (tokens & 31)) & 1) == 0
    tl.store(logits_ptr + row * logits_row_stride + (tokens - start), float("-inf"), mask=inside & is_forbidden)


def apply_token_mask(logits: Tensor, masks: Tensor, mask_of: Tensor, *, start: int) -> None:
    """Apply masks as `nvcli.kernels.token_mask.apply_token_mask` does."""
    num_rows, num_tokens = logits.shape
    if not num_rows or not num_tokens:
        return
    assert logits.stride(1) == 1
    assert masks.stride(1) == 1
    _apply_token_mask_kernel[(num_rows, triton.cdiv(num_tokens, _BLOCK))](
        logits,
        masks,
        mask_of,
        logits.stride(0),
        masks.stride(0),
        start,
        start + num_tokens,
        masks.shape[1],
        BLOCK=_BLOCK,
    )
