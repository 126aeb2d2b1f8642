"""Values of a checkpoint's tensors with an adapter's changes: computed in float32, and rounded by the caller when they
are stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from nvcli.models.stored_values import OpenFiles, reading, take_rows
from nvcli.models.tensor_info import (
    BiasChange,
    LowRankChange,
    RowPlaces,
    RowsChange,
    RowsFactor,
    TensorInfo,
    TernaryChange,
)

_LEAST_MEAN = 1e-5
"""The least mean magnitude of a weight that becomes ternary."""
_LARGEST = torch.finfo(torch.float32).max


def read_values(files: OpenFiles, info: TensorInfo, part: Sequence[slice], device: torch.device) -> Tensor:
    """Read the values of a part of a tensor that is not empty, [rows, columns] or [rows], with its changes.

    Without changes they are as `OpenFiles.read` returns them, otherwise in float32 on `device`. Raises the same errors.
    """
    if not info.changes:
        return files.read(info, part, device)
    rows = part[0]
    needs_rows = any(isinstance(change, LowRankChange) and change.magnitude is not None for change in info.changes)
    read = (rows, slice(0, info.shape[1])) if needs_rows else tuple(part)
    values = files.read(replace(info, changes=()), read, device).to(device).float()
    for change in info.changes:
        if isinstance(change, TernaryChange):
            values = _make_ternary(files, values, info)
        elif isinstance(change, RowsFactor):
            factors = read_stored(files, change.values, (rows,), device).float() * change.scaling
            values = values * (factors.square() if change.is_squared else factors).unsqueeze(1)
        elif isinstance(change, RowsChange):
            values = _replace_rows(files, values, change, read)
        elif isinstance(change, BiasChange):
            added = read_features(files, change.values, change.features, rows, device).float()
            values = values + change.scaling * added
        else:
            values = _add_product(files, values, change, read)
    return values[:, part[1]] if needs_rows else values


def _make_ternary(files: OpenFiles, values: Tensor, info: TensorInfo) -> Tensor:
    """Round values to multiples of the mean magnitude of the whole weight, at most one."""
    whole = [slice(0, length) for length in info.shape]
    weight = files.read(replace(info, changes=()), whole, values.device).to(values.device).float()
    scale = weight.abs().mean().clamp_(min=_LEAST_MEAN)
    return (values / scale).round_().clamp_(-1, 1) * scale


def _add_product(files: OpenFiles, values: Tensor, change: LowRankChange, part: Sequence[slice]) -> Tensor:
    rows, columns = part
    device, features, ranks = values.device, change.features, slice(0, change.down.shape[0])
    up = read_features(files, change.up, features, rows, device).float()
    down = read_stored(files, change.down, (ranks, columns), device).float()
    values = torch.addmm(values, up.t(), down, alpha=change.scaling)
    if change.magnitude is None:
        return values
    magnitude = read_features(files, change.magnitude, features, rows, device).float()
    lengths: Tensor = torch.linalg.vector_norm(values, dim=1)
    return values * (magnitude / lengths).unsqueeze(1)


def read_features(files: OpenFiles, info: TensorInfo, features: RowPlaces, rows: slice, device: torch.device) -> Tensor:
    """Read the features of a weight's rows, out of a matrix [rank, features] or a vector [features], in the file's type
    on `device`."""
    whole = [slice(0, length) for length in info.shape[:-1]]
    values = read_stored(files, info, (*whole, features.span(rows)), device)
    return take_rows(values, features, rows, dim=-1)


def read_stored(files: OpenFiles, info: TensorInfo, part: Sequence[slice], device: torch.device) -> Tensor:
    """Read a part of an adapter's tensor in the file's type. Raises LoadError, which names the adapter's file."""
    with reading(info.file):
        return files.read(info, part, device).to(device)


def are_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite, also in float32."""
    if values.numel() == 0:
        return True
    return all(abs(end.item()) <= _LARGEST for end in values.aminmax())  # one pass; NaN is either end


def check_finite(values: Tensor, info: TensorInfo) -> None:
    """Raise LoadError if values that were read of an adapter's tensor are NaN or infinite."""
    if not are_finite(values):
        raise info.error("has values that are NaN or infinite; download it again")


def _replace_rows(files: OpenFiles, values: Tensor, change: RowsChange, part: Sequence[slice]) -> Tensor:
    rows, columns = part
    found = [(row - rows.start, number) for number, row in enumerate(change.rows) if rows.start <= row < rows.stop]
    if not found:
        return values
    replaced = read_stored(files, change.values, (slice(0, len(change.rows)), columns), values.device).float()
    places, numbers = torch.tensor(found, device=values.device).unbind(1)
    return values.index_copy(0, places, replaced[numbers])
