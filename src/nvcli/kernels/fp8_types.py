"""FP8 (e4m3) numbers, and activations in FP8: codes and the scales that their values have been divided by
(`kernels/fp8.py`).

Shapes: T rows, `in` features, G = in / 128, rounded up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.kernels.weight_formats import FP8Scaling

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
LEAST_MAX = 1e-6
"""Values that share a scale are taken to be at least as large as this, so that no scale is zero."""


class QuantisedRows(NamedTuple):
    """Rows of activations in FP8, with the scales that their values have been divided by."""

    codes: Tensor
    """[T, in] e4m3, contiguous."""
    scales: Tensor
    """[T] float32, or for blocks [T, G]."""
    dtype: torch.dtype
    """The type of the values that the codes stand for, and of a product with them."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def scaling(self) -> FP8Scaling:
        return "channel" if self.scales.dim() == 1 else "block"


Activations = Tensor | QuantisedRows
"""What a linear layer multiplies: [T, in]."""
