"""Rows rounded to 8 bits, each with a scale of its own, as BitNet's projections read them
(https://arxiv.org/abs/2402.17764). Plain torch."""

from __future__ import annotations

from torch import Tensor

_LEAST = 1e-5
"""The least largest number of a row."""


def round_rows(x: Tensor) -> Tensor:
    """Round rows to multiples of 1/127 of their largest number: [T, N] → [T, N], in the same type."""
    values = x.float()
    scale = 127 / values.abs().amax(dim=-1, keepdim=True).clamp_(min=_LEAST)
    return ((values * scale).round_().clamp_(-128, 127) / scale).to(x.dtype)
