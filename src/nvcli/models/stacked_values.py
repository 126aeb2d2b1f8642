"""Values of several weights that are stored alike, read and decoded together.

An NVFP4 checkpoint of many experts has tens of thousands of small matrices, each of a few small tensors. A GPU takes
longer to be told what to do with each of them than to do it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.kernels.mxfp4 import numbers_of_bytes
from nvcli.models.stored_values import OpenFiles, scale_codes
from nvcli.models.tensor_info import TensorInfo

_PER_BYTE = 2


class StackedPart(NamedTuple):
    """The same part of several weights, one below the other."""

    values: Tensor
    """[weights × rows, columns] float32."""
    factors: Tensor
    """The number that all scales of a row's weight have been multiplied by, [weights × rows] float32."""


def stack_key(info: TensorInfo, part: Sequence[slice]) -> Hashable | None:
    """Return what this part of a weight has in common with those that it can be read with; None: it is read alone.

    Read together are parts of whole weights in FP4 with one factor, whose columns are not cut within a group.
    """
    codes = info.codes
    if codes is None or codes.numbers != "fp4" or codes.factor is None or len(part) != 2:
        return None
    if codes.zeros is not None or codes.groups is not None or codes.columns is not None or info.changes:
        return None
    if info.expert is not None or info.first_row or info.row_step != 1 or info.is_transposed or info.has_ones:
        return None
    (rows, columns), (high, wide) = part, codes.block
    stored = [one.stored for one in (info, codes.scales, codes.factor)]
    is_plain = [one is not None and len(one.shape) == 2 for one in stored[:2]] == [True, True]
    if not is_plain or high != 1 or wide % _PER_BYTE or columns.start % wide or columns.stop % wide:
        return None
    forms = [None if one is None else (one.shape, one.dtype) for one in stored]
    return rows.start, rows.stop, columns.start, columns.stop, wide, codes.divides, codes.unit, *forms


def read_stack(
    files: OpenFiles, infos: Sequence[TensorInfo], part: Sequence[slice], device: torch.device, pairs: Tensor
) -> StackedPart:
    """Read the same part of weights with the same `stack_key`. `pairs`: `byte_pairs` of the device.

    Raises SafetensorError and OSError for files that cannot be read.
    """
    rows, columns = part
    found = [info.codes for info in infos if info.codes is not None]
    first, wide = found[0], found[0].block[1]
    stored = rows, slice(columns.start // _PER_BYTE, columns.stop // _PER_BYTE)
    groups = rows, slice(columns.start // wide, columns.stop // wide)
    numbers = numbers_of_bytes(files.read_together(infos, stored).to(device), pairs)
    scales = files.read_together([codes.scales for codes in found], groups).to(device).float()
    factors = files.read_together([one for codes in found if (one := codes.factor) is not None], ()).to(device).float()
    factors = (factors.reciprocal() if first.divides else factors).repeat_interleave(rows.stop - rows.start)
    scales = (scales * first.unit).mul_(factors.unsqueeze(1))
    values = scale_codes(numbers.view(*scales.shape, wide), scales.unsqueeze(2))
    return StackedPart(values.flatten(1), factors)
