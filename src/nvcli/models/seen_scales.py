"""SeenScales: the scales that a thread has read, of which none may be NaN, infinite or of a sign that its format lacks.

Such a number makes each weight that it belongs to NaN, or something else than it was, and answers say nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvcli.models.tensor_info import TensorInfo

_LARGEST, _SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
_LARGEST_EXPONENT = 254
"""The next one stands for NaN (`kernels/mxfp4.py`)."""


class SeenScales:
    """Keeps the smallest and the largest number of each tensor on its device, which is waited for at the end alone."""

    def __init__(self) -> None:
        self._seen: list[tuple[TensorInfo, float]] = []
        """Each tensor with the smallest number that it may hold."""
        self._ends: list[Tensor] = []
        """[2, tensors] float32 each: their smallest and largest numbers."""

    def add(
        self, infos: Sequence[TensorInfo], values: Tensor, *, is_signed: bool = False, is_divisor: bool = False
    ) -> None:
        """Note what was read of tensors, one after the other and as much of each, in float32 or as exponents. Scales
        that are not signed may be 0, which some formats store for blocks of nothing but zeros; a divisor may not."""
        if values.numel():
            parts = values.reshape(len(infos), -1)
            self._ends.append(torch.stack((parts.amin(1), parts.amax(1))).float())
            least = -_LARGEST if is_signed else _SMALLEST if is_divisor else 0.0
            self._seen += [(info, least) for info in infos]

    def check(self) -> None:
        """Wait for the device. Raises LoadError for the first tensor with a number that is no scale."""
        if not self._ends:
            return
        ends = torch.cat(self._ends, 1).t().tolist()
        for (info, least), (low, high) in zip(self._seen, ends, strict=True):
            most = _LARGEST_EXPONENT if info.dtype == "U8" else _LARGEST
            if not (low >= least and high <= most):
                found = high if low >= least else low
                what = "255, an exponent that stands for NaN" if info.dtype == "U8" else str(found)
                raise info.error(
                    f"has a scale that is {what}, with which its weight means nothing: the file is damaged; download "
                    "it again"
                )
