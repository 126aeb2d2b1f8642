"""Several weights that are stored alike, read and decoded together.

A checkpoint of many experts has tens of thousands of small matrices, each of one or a few tensors. A GPU takes longer
to be told what to do with each of them than to do it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.kernels.mxfp4 import numbers_of_bytes, powers_of_scales
from nvcli.models.quantisation.quantisation import FP4_PAIRS
from nvcli.models.stored_values import OpenFiles, ranges_of, scale_codes
from nvcli.models.tensor_info import ALL_ROWS, Codes, FileRange, TensorInfo


class StoredStack(NamedTuple):
    """The same part of several weights as a checkpoint has it, one below the other."""

    codes: Tensor
    """[weights × rows, columns] numbers or codes, or of FP4 bytes [weights × rows, columns / 2]."""
    scales: Tensor | None
    """[weights × blocks of rows, groups]: float32, or uint8 where they are exponents; None: the weights are plain."""
    factors: Tensor | None
    """The number that all scales of a weight are multiplied by, [weights] float32; None: there is none."""


def stack_key(info: TensorInfo, part: Sequence[slice]) -> Hashable | None:
    """Return what this part of a weight has in common with those that it can be read with; None: it is read alone.

    Read together are parts of matrices of their own that are plain, or in FP8 or FP4 and not cut within what shares a
    scale.
    """
    if len(part) != 2 or info.changes or info.flat is not None or info.stored is None or len(info.stored.shape) != 2:
        return None
    if info.form is not None:
        return None
    if info.expert is not None or info.rows != ALL_ROWS or info.is_transposed or info.has_ones:
        return None
    rows, columns = part
    common = rows.start, rows.stop, columns.start, columns.stop, info.stored.shape, info.stored.dtype
    codes = info.codes
    if codes is None:
        return None if info.packing is not None else common
    if codes.numbers == "integer" or info.packing not in (None, FP4_PAIRS) or codes.scales.is_transposed:
        return None
    if codes.zeros is not None or codes.zero or codes.groups is not None or codes.columns is not None:
        return None
    others = [one.stored for one in (codes.scales, codes.factor) if one is not None]
    if None in others or codes.scales.has_ones or codes.scales.expert is not None:
        return None
    (high, wide), is_one = codes.block, has_one_scale(codes)
    if not is_one and (rows.start % high or rows.stop % high):
        return None
    if not is_one and codes.scales.shape[1:] not in ((), (1,)) and (columns.start % wide or columns.stop % wide):
        return None
    if info.packing is not None and (columns.start % 2 or columns.stop % 2):
        return None
    forms = [None if one is None else (one.shape, one.dtype) for one in others]
    return *common, high, wide, codes.numbers, codes.divides, codes.unit, *forms


def stack_ranges(infos: Sequence[TensorInfo], part: Sequence[slice]) -> Iterator[FileRange]:
    """Yield what `read_stack` reads of files."""
    yield from ranges_of(infos, part)
    codes = [info.codes for info in infos if info.codes is not None]
    if not codes:
        return
    yield from ranges_of([one.scales for one in codes], _part_of_scales(codes[0], part))
    if codes[0].factor is not None:
        yield from ranges_of([one.factor for one in codes if one.factor is not None], ())


def read_stack(
    files: OpenFiles, infos: Sequence[TensorInfo], part: Sequence[slice], device: torch.device
) -> StoredStack:
    """Read the same part of weights with the same `stack_key`. Raises SafetensorError and OSError for files that cannot
    be read."""
    rows, columns = part
    first = infos[0].codes
    if infos[0].packing is not None:
        columns = slice(columns.start // 2, columns.stop // 2)
    stored = files.read_together(infos, (rows, columns)).to(device)
    if first is None:
        return StoredStack(stored, None, None)
    codes = [info.codes for info in infos if info.codes is not None]
    of_scales = [one.scales for one in codes]
    scales = files.read_together(of_scales, _part_of_scales(first, part)).to(device)
    scales = scales.view(len(scales), -1) if len(scales) else scales
    if scales.dtype != torch.uint8:
        scales = scales.float() * first.unit
    files.scales.add(of_scales, scales, is_signed=first.is_signed)
    factors = None
    if first.factor is not None:
        of_factors = [one.factor for one in codes if one.factor is not None]
        factors = files.read_together(of_factors, ()).to(device).float()
        files.scales.add(of_factors, factors, is_divisor=first.divides)
        factors = factors.reciprocal() if first.divides else factors
    return StoredStack(stored, scales, factors)


def decode_stack(stack: StoredStack, info: TensorInfo, num_weights: int, pairs: Tensor) -> Tensor:
    """Return the values of a stack of `num_weights` weights like `info`: [weights × rows, columns], in float32, or for
    plain weights and FP4 with powers of 2 in a type that holds them. `pairs`: `byte_pairs` of the device."""
    if stack.scales is None or info.codes is None:
        return stack.codes
    numbers = stack.codes if info.packing is None else numbers_of_bytes(stack.codes, pairs)
    scales = scales_of(stack, num_weights)
    tiles = numbers.view(len(scales), -1, scales.shape[1], numbers.shape[1] // scales.shape[1])
    return scale_codes(tiles, scales[:, None, :, None]).view(numbers.shape)


def scales_of(stack: StoredStack, num_weights: int) -> Tensor:
    """Return the scales of a stack with the factors of its weights: [weights × blocks of rows, groups]."""
    scales = stack.scales
    assert scales is not None
    if scales.dtype == torch.uint8:
        scales = powers_of_scales(scales)
    if stack.factors is None:
        return scales
    return scales * stack.factors.repeat_interleave(len(scales) // num_weights).unsqueeze(1)


def has_one_scale(codes: Codes) -> bool:
    """Whether all rows and columns share a scale."""
    return math.prod(codes.scales.shape) == 1


def _part_of_scales(codes: Codes, part: Sequence[slice]) -> tuple[slice, ...]:
    """Return the part of a weight's scales that belongs to a part of the weight; empty: all scales are one number."""
    if has_one_scale(codes):
        return ()
    (rows, columns), (high, wide) = part, codes.block
    of_rows = slice(rows.start // high, rows.stop // high)
    if len(codes.scales.shape) == 1:
        return (of_rows,)
    if codes.scales.shape[1] == 1:
        return of_rows, slice(0, 1)
    return of_rows, slice(columns.start // wide, columns.stop // wide)
