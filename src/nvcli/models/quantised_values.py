"""The values of quantised weights, read from a checkpoint's files for some rows and columns.

Codes are kept in files as `Packing` says. Whatever the format, codes, zeros and scales become matrices of the part that
is asked for, and the values are (code - zero) × scale in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nvcli.errors import LoadError
from nvcli.kernels.unpack import scale_codes, unpack
from nvcli.kernels.weight_formats import AWQ_ORDER, Packing
from nvcli.models.safetensors_header import TensorInfo

ReadSlice = Callable[[TensorInfo, Sequence[slice]], Tensor]
"""Reads a part of a tensor in a file, onto the device where values are computed."""

_ALL = slice(None)


def read_values(info: TensorInfo, rows: slice, columns: slice, read: ReadSlice) -> Tensor:
    """Read the values of a part of a quantised weight: [rows, columns] float32.

    Raises LoadError where the index of a column's group is not that of a group.
    """
    packing = info.packing
    assert packing is not None
    if packing.kind == "scaled":
        stored_zeros = info.parts.get("zeros")
        return scale_codes(
            read(info, (rows, columns)),
            read_grid(info.parts["scales"], packing.block, rows, columns, read),
            None if stored_zeros is None else read_grid(stored_zeros, packing.block, rows, columns, read),
        )
    codes, scales, zeros, group_of = read_integers(info, rows, columns, read)
    if packing.block[0] > 1:  # a single scale
        return scale_codes(codes, scales, zeros)
    return scale_codes(codes, scales[:, group_of], zeros[:, group_of])


def read_integers(
    info: TensorInfo, rows: slice, columns: slice, read: ReadSlice
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read a part of a weight in words: its codes [rows, columns] uint8, the scales and zeros of all groups [rows or 1,
    groups] float32, and the number of each column's group, [columns].

    Raises LoadError where the index of a column's group is not that of a group.
    """
    assert info.packing is not None
    codes = _read_codes(info, info.packing, rows, columns, read)
    scales, zeros = _read_groups(info, info.packing, rows, read)
    return codes, scales, zeros, _group_of_column(info, info.packing, columns, scales, read)


def read_grid(info: TensorInfo, block: tuple[int, int], rows: slice, columns: slice, read: ReadSlice) -> Tensor:
    """Read the scales of a part of a weight, of which each `block` has one: float32 [rows or 1, columns or 1]."""
    if all(length == 1 for length in info.shape):
        return read(info, [_ALL] * len(info.shape)).float().view(1, 1)
    if block[0] == 1 and len(info.shape) == 1:
        return read(info, (rows,)).float().view(-1, 1)
    first_row, first_column = rows.start // block[0], columns.start // block[1]
    part = slice(first_row, -(-rows.stop // block[0])), slice(first_column, -(-columns.stop // block[1]))
    grid = read(info, part).float()
    if block[0] > 1:
        grid = grid[_blocks_of(rows, block[0], grid.device)]
    if grid.shape[1] > 1:
        grid = grid[:, _blocks_of(columns, block[1], grid.device)]
    return grid


def _blocks_of(part: slice, size: int, device: torch.device) -> Tensor:
    """Return for each index of a part the number of its block, from the part's first one on."""
    return torch.arange(part.start, part.stop, device=device).floor_divide_(size).sub_(part.start // size)


def _read_codes(info: TensorInfo, packing: Packing, rows: slice, columns: slice, read: ReadSlice) -> Tensor:
    """Read the codes of words: uint8 [rows, columns]."""
    n, bits = packing.codes_per_word, packing.bits
    if packing.kind == "compressed":
        return _cut(unpack(read(info, (rows, _words(columns, n))), bits, dim=1), columns, n, dim=1)
    if packing.kind == "gptq":
        return _cut(unpack(read(info, (_words(columns, n), rows)), bits, dim=0), columns, n, dim=0).t()
    words = read(info, (columns, _words(rows, n)))
    return _cut(unpack(words, bits, dim=1, order=AWQ_ORDER), rows, n, dim=1).t()


def _read_groups(info: TensorInfo, packing: Packing, rows: slice, read: ReadSlice) -> tuple[Tensor, Tensor]:
    """Read the scales and zeros of all groups of some rows: float32 [rows or 1, groups] each, zeros maybe 1."""
    n, bits = packing.codes_per_word, packing.bits
    scales, zeros = info.parts["scales"], info.parts.get("zeros")
    middle = float(1 << (bits - 1))
    if packing.kind == "compressed":
        if len(scales.shape) < 2 or packing.block[0] > 1:
            factors = read(scales, [_ALL] * len(scales.shape)).float().view(1, 1)
            return factors, torch.full((1, 1), middle, device=factors.device)
        factors = read(scales, (rows, _ALL)).float()
        if zeros is None:
            return factors, torch.full_like(factors, middle)
        return factors, _cut(unpack(read(zeros, (_words(rows, n), _ALL)), bits, dim=0), rows, n, dim=0).float()
    factors = read(scales, (_ALL, rows)).float().t()
    if zeros is None:
        return factors, torch.full_like(factors, middle)
    order = AWQ_ORDER if packing.kind == "awq" else None
    codes = _cut(unpack(read(zeros, (_ALL, _words(rows, n))), bits, dim=1, order=order), rows, n, dim=1)
    return factors, codes.t().float() + packing.zero_offset


def _group_of_column(info: TensorInfo, packing: Packing, columns: slice, scales: Tensor, read: ReadSlice) -> Tensor:
    """Return the number of the group that each column belongs to."""
    groups = info.parts.get("groups")
    if groups is None:
        return torch.arange(columns.start, columns.stop, device=scales.device) // packing.block[1]
    found = read(groups, (columns,))
    if int(found.min()) < 0 or int(found.max()) >= scales.shape[1]:
        raise LoadError(
            f"{groups.file}: tensor {groups.name} has groups from {int(found.min())} to {int(found.max())}, and "
            f"{info.parts['scales'].name} has {scales.shape[1]} groups; download it again"
        )
    return found


def _words(part: slice, codes_per_word: int) -> slice:
    """Return the words that hold some codes."""
    return slice(part.start // codes_per_word, -(-part.stop // codes_per_word))


def _cut(codes: Tensor, part: slice, codes_per_word: int, *, dim: int) -> Tensor:
    """Return the codes that were asked for, of those in the words that hold them."""
    return codes.narrow(dim, part.start % codes_per_word, part.stop - part.start)
