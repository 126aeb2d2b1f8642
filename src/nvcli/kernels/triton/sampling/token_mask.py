"""Masks of the tokens that may be chosen, applied in one pass that reads no logits where all tokens are forbidden.

Shapes: N rows of logits; M tokens `start` to `end`, the whole vocabulary or a shard of it; R masks of W words.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = tl.constexpr(4096)
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
):
    """Program (row, block) forbids the tokens of one block of a row. It writes the whole block, because single tokens
    are written one by one, which takes much longer than to read the others."""
    row = tl.program_id(0).to(tl.int64)
    mask = tl.load(mask_of_ptr + row).to(tl.int64)
    if mask < 0:
        return
    masks_ptr += mask * masks_row_stride
    first = start + tl.program_id(1) * _BLOCK
    tokens = first + tl.arange(0, _BLOCK)
    inside = tokens < end
    logits = logits_ptr + row * logits_row_stride + (tokens - start)
    all_words = (first >> 5) + tl.arange(0, _BLOCK // 16)  # twice as many as there are, as a block may begin in one
    is_own = all_words <= (first + _BLOCK - 1) >> 5
    any_allowed = tl.max(tl.load(masks_ptr + all_words, mask=is_own & (all_words < num_words), other=0) != 0)
    if any_allowed:
        words = tokens >> 5
        bits = tl.load(masks_ptr + words, mask=inside & (words < num_words), other=0)
        is_allowed = ((bits >> (tokens & 31)) & 1) != 0
        tl.store(logits, tl.where(is_allowed, tl.load(logits, mask=inside, other=0.0), float("-inf")), mask=inside)
    else:
        tl.store(logits, float("-inf"), mask=inside)


def apply_token_mask(logits: Tensor, masks: Tensor, mask_of: Tensor, *, start: int = 0) -> None:
    """Apply masks as `nvcli.kernels.token_mask.apply_token_mask` does."""
    num_rows, num_tokens = logits.shape
    if not num_rows or not num_tokens:
        return
    assert logits.stride(1) == 1
    assert masks.stride(1) == 1
    _apply_token_mask_kernel[(num_rows, triton.cdiv(num_tokens, _BLOCK.value))](
        logits,
        masks,
        mask_of,
        logits.stride(0),
        masks.stride(0),
        start,
        start + num_tokens,
        masks.shape[1],
    )
