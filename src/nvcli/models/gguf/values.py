"""The numbers of a tensor in a GGUF file: decoded, with its rows and values as the model has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.gguf.blocks import numbers_of_blocks
from nvcli.models.gguf.types import BLOCK_TYPES
from nvcli.models.tensor_info import GGUFForm, GGUFOrder, TensorInfo


class ReadsTensors(Protocol):
    """Reads parts of the files' tensors."""

    def read_stored(self, info: TensorInfo, part: Sequence[slice]) -> Tensor: ...


def read_form(files: ReadsTensors, info: TensorInfo, part: Sequence[slice], device: torch.device) -> Tensor:
    """Read the values of a part that is not empty, [rows, columns] or [rows], for `OpenFiles.read`."""
    form = info.form
    assert form is not None
    assert info.rows.is_whole, "OpenFiles.read takes the rows"
    rows, *others = part

    def read_rows(held: slice) -> Tensor:
        return _read_rows(files, info, form, (held, *others), device)

    values = read_rows(rows) if form.rows is None else _in_order(read_rows, form.rows, rows)
    if form.offset:
        values = values.float() + form.offset
    return (-values.float()).log() if form.is_power else values


def _in_order(read_rows: Callable[[slice], Tensor], order: GGUFOrder, rows: slice) -> Tensor:
    """Read rows that lie elsewhere: at once, or if many others lie between them, run by run."""
    places = _places(order, rows)
    if order.size == 1:
        first = int(places.min())
        found = read_rows(slice(first, int(places.max()) + 1))
        return found.index_select(0, (places - first).to(found.device))
    ends = [*((places.diff() != 1).nonzero().flatten() + 1).tolist(), len(places)]
    starts = [0, *ends[:-1]]
    return torch.cat(
        [read_rows(slice(int(places[a]), int(places[b - 1]) + 1)) for a, b in zip(starts, ends, strict=True)]
    )


def _places(order: GGUFOrder, wanted: slice) -> Tensor:
    """Return the place of each wanted row or column in the file."""
    numbers = torch.arange(wanted.start, wanted.stop, device="cpu")
    within = numbers - order.start
    outer, rest = within // order.unit, within % order.unit
    group, rest = rest // (order.members * order.size), rest % (order.members * order.size)
    member, place = rest // order.size, rest % order.size
    moved = order.start + outer * order.unit + (member * order.groups + group) * order.size + place
    return torch.where(within < 0, numbers, moved)


def _read_rows(
    files: ReadsTensors, info: TensorInfo, form: GGUFForm, part: Sequence[slice], device: torch.device
) -> Tensor:
    """Read rows as they lie in the file, with their columns in order."""
    if form.blocks is None and form.columns is None:
        return files.read_stored(info, part).to(device)
    rows, wanted = part
    columns, places = wanted, None
    if form.columns is not None:
        places = _places(form.columns, wanted)
        columns = slice(int(places.min()), int(places.max()) + 1)
    values = _read_columns(files, info, form, (rows, columns), device)
    return values if places is None else values.index_select(1, (places - columns.start).to(values.device))


def _read_columns(
    files: ReadsTensors, info: TensorInfo, form: GGUFForm, part: tuple[slice, slice], device: torch.device
) -> Tensor:
    if form.blocks is None:
        return files.read_stored(info, part).to(device)
    rows, columns = part
    kind = BLOCK_TYPES[form.blocks]
    first, last = columns.start // kind.block, ceil_div(columns.stop, kind.block)
    stored = files.read_stored(info, (rows, slice(first * kind.block_bytes, last * kind.block_bytes))).to(device)
    values = numbers_of_blocks(stored.reshape(-1, kind.block_bytes), kind.name).view(len(stored), -1)
    return values[:, columns.start - first * kind.block : columns.stop - first * kind.block]
