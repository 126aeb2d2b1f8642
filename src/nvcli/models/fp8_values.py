"""FP8 weights as ranks keep them: codes and scales, taken from a checkpoint where it has the same, or made here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvcli.kernels.fp8 import quantise_weight
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.weight_formats import FP8_BLOCK
from nvcli.models.quantised_values import ReadSlice, read_grid
from nvcli.models.safetensors_header import TensorInfo
from nvcli.models.stored_values import OpenFiles
from nvcli.models.weights import WeightSource

_STORED_AS = "F8_E4M3"


def read_fp8(files: OpenFiles, info: TensorInfo, source: WeightSource, device: torch.device) -> tuple[Tensor, Tensor]:
    """Read a part of a weight as codes [rows, columns] e4m3 and scales, [rows] or [rows / 128, columns / 128] float32.

    Raises SafetensorError and OSError for files that cannot be read.
    """
    order = source.tensor.row_order
    taken = _take_over(info, source, files.reader(device))
    if taken is None:
        values = files.read(info, source.read, device).to(device)
        values = values if order is None else reorder_rows(values, order)
        scaling = source.tensor.scaling
        assert scaling is not None
        return quantise_weight(values, scaling)
    codes, scales = taken
    if order is not None:
        codes = reorder_rows(codes.view(torch.uint8), order).view(FP8)
        scales = reorder_rows(scales, order) if scales.dim() == 1 else scales
    return codes, scales


def reorder_rows(values: Tensor, order: Sequence[int]) -> Tensor:
    """Put the rows of each head into another order. values: [heads × len(order), ...] → the same shape."""
    indices = torch.tensor(order, device="cpu")
    return values.view(-1, len(order), *values.shape[1:])[:, indices].flatten(0, 1)


def _take_over(info: TensorInfo, source: WeightSource, read: ReadSlice) -> tuple[Tensor, Tensor] | None:
    """Return the codes and scales of a checkpoint, or None where they are not those that the rank keeps."""
    packing, scales = info.packing, source.scales
    if packing is None or packing.kind != "scaled" or info.dtype != _STORED_AS or scales is None:
        return None
    rows, columns = source.read
    stored_rows = slice(info.first_row + rows.start, info.first_row + rows.stop)
    if scales.scaling == "channel":
        if packing.block[1] < columns.stop:  # a row has several
            return None
        grid = read_grid(info.parts["scales"], packing.block, stored_rows, columns, read)
        return read(info, (stored_rows, columns)), grid.expand(rows.stop - rows.start, 1).squeeze(1)
    order = source.tensor.row_order
    if packing.block != (FP8_BLOCK, FP8_BLOCK) or (order is not None and FP8_BLOCK % len(order)):
        return None
    if stored_rows.start % FP8_BLOCK:
        return None
    blocks = tuple(slice(part.start // FP8_BLOCK, -(-part.stop // FP8_BLOCK)) for part in (stored_rows, columns))
    return read(info, (stored_rows, columns)), read(info.parts["scales"], blocks).float()
