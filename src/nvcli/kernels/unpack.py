"""Codes of a few bits out of words of 32 bits, and the values of quantised weights, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvcli.kernels.fp8_types import FP8, numbers
from nvcli.kernels.weight_formats import WORD_BITS


def unpack(words: Tensor, bits: int, *, dim: int, order: Sequence[int] | None = None) -> Tensor:
    """Return the codes of int32 words, those of a word one after the other along `dim`: with n codes a word, [A, B] →
    uint8 [A × n, B] for dim 0 and [A, B × n] for dim 1.

    The lowest bits of a word hold its first code, or with `order` the code at the place `order[0]`.
    """
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    if order is not None:
        shifts = shifts[torch.tensor(order, device=words.device).argsort()]
    shape = (1, -1, 1) if dim == 0 else (1, 1, -1)
    codes = (words.unsqueeze(1 + dim) >> shifts.view(shape)) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(dim, dim + 1)


def scale_codes(codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Compute (codes - zeros) × scales in float32. codes: of any shape, not float32; scales, zeros: as large, or 1 in
    dimensions that share them."""
    values = numbers(codes) if codes.dtype == FP8 else codes.float()  # a copy
    return (values if zeros is None else values.sub_(zeros)).mul_(scales)
