"""Which products of many rows with FP8 weights Hopper's own kernel multiplies (`hopper_fp8.py`): those of the shapes
and numbers of rows for which it was measured to be faster, as `fp8_launches.py` says. All others are left to
`kernels/fp8.py`.

Shapes: T rows, `in` and `out` features.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from nvcli.config_types import FP8Accumulation
from nvcli.kernels.fp8_types import QuantisedRows
from nvcli.kernels.triton.fp8_launches import MANY_ROWS, HopperLaunch, ManyRowsKind, ManyRowsRanges, Shape
from nvcli.kernels.triton.triton_version import has_known_gluon
from nvcli.kernels.weight_formats import FP8_ALIGNMENT, FP8_BLOCK

_CAPABILITY = (9, 0)


def choose_linear(x: QuantisedRows, weight: Tensor, accumulation: FP8Accumulation) -> HopperLaunch | None:
    """Choose the launch of a product; None: another kernel multiplies. weight: [out, in]."""
    return _choose(x.scaling, x, weight, accumulation)


def choose_gated(x: QuantisedRows, weight: Tensor, accumulation: FP8Accumulation) -> HopperLaunch | None:
    """Choose the launch of a product of gate and up projection with their activation; None: they are multiplied first.
    weight: [2 out, in]."""
    if x.scaling == "block" or weight.shape[0] % (2 * FP8_BLOCK):
        return None
    return _choose("gated", x, weight, accumulation)


def _choose(kind: ManyRowsKind, x: QuantisedRows, weight: Tensor, accumulation: FP8Accumulation) -> HopperLaunch | None:
    chosen = None
    for least_rows, launch in _ranges(accumulation, kind, *weight.shape):
        if len(x.codes) >= least_rows:
            chosen = launch
    return chosen if chosen is not None and _serves(x, weight) else None


def _serves(x: QuantisedRows, weight: Tensor) -> bool:
    is_aligned = all(size % FP8_ALIGNMENT == 0 for size in weight.shape)
    return is_aligned and x.dtype.itemsize == 2 and _has_kernel(weight.device)


@lru_cache(maxsize=64)
def _has_kernel(device: torch.device) -> bool:
    return has_known_gluon() and torch.cuda.get_device_capability(device) == _CAPABILITY


@lru_cache(maxsize=256)
def _ranges(accumulation: FP8Accumulation, kind: ManyRowsKind, out_features: int, in_features: int) -> ManyRowsRanges:
    """Return the ranges of a shape. One that was not measured has none, but with scales by blocks, which torch's own
    product seldom takes, those of the nearest one."""
    table = MANY_ROWS[accumulation][kind]
    if kind != "block":
        return table.get((out_features, in_features), ())

    def distance(shape: Shape) -> float:
        return abs(math.log(shape[0] / out_features)) + abs(math.log(shape[1] / in_features))

    return table[min(table, key=distance)]
