"""FP8 (e4m3) numbers, and activations in FP8: codes and the scales that their values have been divided by
(`kernels/fp8.py`).

Shapes: T rows, `in` features, G = in / 128, rounded up.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.kernels.weight_formats import FP8_BLOCK, FP8Scaling
from nvcli.kernels.whole_numbers import ceil_div

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
LEAST_MAX = 1e-6
"""Values that share a scale are taken to be at least as large as this, so that no scale is zero."""
_PAIRS = 1 << 16


def numbers(codes: Tensor) -> Tensor:
    """Return the numbers that e4m3 codes stand for, in float32 and memory of their own.

    torch converts them one by one on a CPU, where two neighbours are looked up together instead: 8 times as fast.
    """
    codes = codes.contiguous()
    if codes.device.type != "cpu" or codes.numel() % 2 or codes.storage_offset() % 2:
        return codes.float()
    pairs = codes.view(-1).view(torch.int16).to(torch.int32).add_(_PAIRS // 2)
    return torch.index_select(_numbers_of_pairs(), 0, pairs).view(torch.float32).view(codes.shape)


@lru_cache(maxsize=1)
def _numbers_of_pairs() -> Tensor:
    """The numbers of all pairs of codes: two float32 in an int64 for each int16, ascending."""
    pairs = torch.arange(-_PAIRS // 2, _PAIRS // 2, dtype=torch.int32, device="cpu").to(torch.int16)
    return pairs.view(FP8).float().view(torch.int64)


class QuantisedRows(NamedTuple):
    """Rows of activations in FP8, with the scales that their values have been divided by."""

    codes: Tensor
    """[T, in] e4m3, contiguous."""
    scales: Tensor
    """[T] float32, or for blocks [T, G]."""
    dtype: torch.dtype
    """The type of the values that the codes stand for, and of a product with them."""
    values: Tensor | None = None
    """[T, in], the values before they were quantised, if LoRA adapters may need them."""

    @staticmethod
    def empty(num_rows: int, size: int, scaling: FP8Scaling, like: Tensor) -> QuantisedRows:
        """Make room for [num_rows, size] of the type and on the device of another tensor."""
        shape = (num_rows,) if scaling == "channel" else (num_rows, ceil_div(size, FP8_BLOCK))
        codes = torch.empty(num_rows, size, dtype=FP8, device=like.device)
        return QuantisedRows(codes, torch.empty(shape, dtype=torch.float32, device=like.device), like.dtype)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def scaling(self) -> FP8Scaling:
        return "channel" if self.scales.dim() == 1 else "block"

    def first_rows(self, num_rows: int) -> QuantisedRows:
        """Return views of the first rows. There are no `values`."""
        return QuantisedRows(self.codes[:num_rows], self.scales[:num_rows], self.dtype)

    def clone(self) -> QuantisedRows:
        values = None if self.values is None else self.values.clone()
        return QuantisedRows(self.codes.clone(), self.scales.clone(), self.dtype, values)


class LowRankSum(NamedTuple):
    """A product that is added to a weight [out, in] before it is quantised: factor × `up` `down`."""

    up: Tensor
    """[out, rank] float32."""
    down: Tensor
    """[rank, in] float32."""
    factor: float


Activations = Tensor | QuantisedRows
"""The input of a linear layer: [T, in]."""
