"""The numbers of a tensor in a GGUF file: decoded, with its rows and values as the model has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.gguf.blocks import KeptCodes, codes_of_blocks, numbers_of_blocks
from nvcli.models.gguf.types import BLOCK_TYPES, TensorType
from nvcli.models.tensor_info import GGUFOrder, TensorInfo


class ReadsTensors(Protocol):
    """Reads parts of the files' tensors."""

    def read(self, info: TensorInfo, part: Sequence[slice], device: torch.device) -> Tensor: ...

    def read_stored(self, info: TensorInfo, part: Sequence[slice]) -> Tensor: ...


def read_form(files: ReadsTensors, info: TensorInfo, part: Sequence[slice], device: torch.device) -> Tensor:
    """Read the values of a part that is not empty, [rows, columns] or [rows], for `OpenFiles.read`."""
    form = info.form
    assert form is not None
    if form.parts is not None:
        return _from_latents(files, *form.parts, part, device)
    columns, places = part[1:], None
    if form.columns is not None:
        places = _places(form.columns, part[1])
        columns = (slice(int(places.min()), int(places.max()) + 1),)
    if form.blocks is None:
        values = _stored_rows(files, info, (part[0], *columns)).to(device)
    else:
        blocks, first = _read_blocks(files, info, (part[0], *columns), BLOCK_TYPES[form.blocks], device)
        values = numbers_of_blocks(blocks.flatten(0, 1), form.blocks).view(len(blocks), -1)
        values = values[:, columns[0].start - first : columns[0].stop - first]
    if places is not None:
        values = values.index_select(1, (places - places.min()).to(device))
    if form.offset:
        values = values.float() + form.offset
    return (-values.float()).log() if form.is_power else values


def read_codes(
    files: ReadsTensors, info: TensorInfo, part: Sequence[slice], device: torch.device, group: int
) -> KeptCodes:
    """Read a part of a weight in blocks that ranks can keep, with scales for each `group` columns of it, all of which
    share one. Raises LoadError if the order of columns does not keep groups together."""
    assert info.form is not None
    assert info.form.blocks is not None
    (rows, columns), places, order = part, None, info.form.columns
    if order is not None:
        if order.size % group:
            raise info.error(
                f"is stored with {order.size} columns at a time in another order, which cuts groups of {group}, so its "
                "bits cannot be kept: use quantization: none"
            )
        places = _places(order, columns)
        columns = slice(int(places.min()), int(places.max()) + 1)
    blocks, first = _read_blocks(files, info, (rows, columns), BLOCK_TYPES[info.form.blocks], device)
    taken = (torch.arange(columns.start, columns.stop, device="cpu") if places is None else places) - first
    found = codes_of_blocks(blocks.flatten(0, 1), info.form.blocks)
    codes = found.codes.view(len(blocks), -1)
    grids = [None if grid is None else grid.view(len(blocks), -1) for grid in found[1:]]
    scales, offsets = (
        grid if grid is None else grid.index_select(1, (taken[::group] * grid.shape[1] // codes.shape[1]).to(device))
        for grid in grids
    )
    assert scales is not None
    return KeptCodes(codes.index_select(1, taken.to(device)), scales, offsets)


def _from_latents(
    files: ReadsTensors, keys: TensorInfo, values: TensorInfo, part: Sequence[slice], device: torch.device
) -> Tensor:
    """Read a part of the projection from latents, whose rows are each head's keys, then its values."""
    (_, key_dim), (_, latents) = keys.shape, values.shape
    value_dim = values.shape[0] // (keys.shape[0] // latents)
    size = key_dim + value_dim
    first, last = part[0].start // size, ceil_div(part[0].stop, size)
    heads = [
        files.read(one, (slice(first * high, last * high), slice(0, wide)), device).to(device).view(-1, high, wide)
        for one, high, wide in ((keys, latents, key_dim), (values, value_dim, latents))
    ]
    rows = torch.cat((heads[0].transpose(1, 2).float(), heads[1].float()), dim=1).flatten(0, 1)
    return rows[part[0].start - first * size : part[0].stop - first * size, part[1]]


def _read_blocks(
    files: ReadsTensors, info: TensorInfo, part: Sequence[slice], kind: TensorType, device: torch.device
) -> tuple[Tensor, int]:
    """Read the blocks that a part of a matrix lies in, [rows, blocks, bytes], and return the first one's column."""
    rows, columns = part
    first, last = columns.start // kind.block, ceil_div(columns.stop, kind.block)
    stored = _stored_rows(files, info, (rows, slice(first * kind.block_bytes, last * kind.block_bytes)))
    return stored.to(device).reshape(len(stored), -1, kind.block_bytes), first * kind.block


def _stored_rows(files: ReadsTensors, info: TensorInfo, part: Sequence[slice]) -> Tensor:
    """Read rows of a tensor as they are stored, each at its place. Rows that lie elsewhere are read at once, or run by
    run if many others lie between them."""
    assert info.form is not None
    assert info.rows.is_whole, "OpenFiles takes the rows"
    order, (rows, *others) = info.form.rows, part
    if order is None:
        return files.read_stored(info, part)
    places = _places(order, rows)
    ends = [*((places.diff() != 1).nonzero().flatten() + 1).tolist(), len(places)]
    if order.size > 1:
        runs = [slice(int(places[a]), int(places[b - 1]) + 1) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        return torch.cat([files.read_stored(info, (run, *others)) for run in runs])
    first = int(places.min())
    found = files.read_stored(info, (slice(first, int(places.max()) + 1), *others))
    return found.index_select(0, (places - first).to(found.device))


def _places(order: GGUFOrder, wanted: slice) -> Tensor:
    """Return the place of each wanted row or column in the file."""
    numbers = torch.arange(wanted.start, wanted.stop, device="cpu")
    within = numbers - order.start
    outer, rest = within // order.unit, within % order.unit
    group, rest = rest // (order.members * order.size), rest % (order.members * order.size)
    member, place = rest // order.size, rest % order.size
    moved = order.start + outer * order.unit + (member * order.groups + group) * order.size + place
    return torch.where(within < 0, numbers, moved)
