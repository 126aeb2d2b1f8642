"""Weights of 4 bits as ranks keep them: words and scales (`kernels/w4.py`), out of the formats of checkpoints."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.errors import LoadError
from nvcli.kernels.w4 import LARGEST_FP4_SCALE, join_scales, pack, pack_mxfp4
from nvcli.kernels.weight_formats import W4Format
from nvcli.models.fp8_values import reorder_rows
from nvcli.models.quantised_values import read_integers
from nvcli.models.safetensors_header import TensorInfo
from nvcli.models.stored_values import OpenFiles
from nvcli.models.weights import WeightSource


class W4Weight(NamedTuple):
    """A part of a weight [rows, columns]."""

    words: Tensor
    scales: Tensor
    order: Tensor | None
    """[columns] int64: where each of the kept columns is in the checkpoint; None: in its place."""


def read_w4(files: OpenFiles, info: TensorInfo, source: WeightSource, device: torch.device) -> W4Weight:
    """Read a part of a weight.

    Raises LoadError where the checkpoint does not have it as config.json says, and SafetensorError and OSError for
    files that cannot be read.
    """
    assert source.scales is not None
    assert isinstance(source.scales.scaling, W4Format)
    if source.scales.scaling.kind == "mxfp4":
        return _read_mxfp4(files, info, source, source.scales.scaling, device)
    return _read_integers(files, info, source, source.scales.scaling, device)


def _read_mxfp4(
    files: OpenFiles, info: TensorInfo, source: WeightSource, kept: W4Format, device: torch.device
) -> W4Weight:
    if info.scales is None:
        raise _not_in_four_bits(info)
    assert source.tensor.row_order is None
    blocks, exponents = files.read_blocks(info, source.read, device)
    if int(exponents.max()) > LARGEST_FP4_SCALE:
        raise LoadError(
            f"{info.file}: tensor {info.scales.name} has scales above {LARGEST_FP4_SCALE}, which 4 bits are not kept "
            "with: use quantization: none"
        )
    return W4Weight(*pack_mxfp4(blocks, exponents, kept), None)


def _read_integers(
    files: OpenFiles, info: TensorInfo, source: WeightSource, kept: W4Format, device: torch.device
) -> W4Weight:
    if info.packing is None or info.packing.bits != 4:
        raise _not_in_four_bits(info)
    rows, columns = source.read
    stored_rows = slice(info.first_row + rows.start, info.first_row + rows.stop)
    codes, scales, zeros, group_of = read_integers(info, stored_rows, columns, files.reader(device))
    order: Tensor | None = None
    assert source.scales is not None
    if source.scales.order_row is not None:
        order = group_of.argsort(stable=True)
        codes, group_of = codes[:, order], group_of[order]
    groups = group_of.view(-1, kept.group)
    if (groups != groups[:, :1]).any():
        raise LoadError(
            f"{info.file}: tensor {info.name} has groups of other columns than config.json says, which are not kept in "
            "4 bits: use quantization: none"
        )
    shape = (len(codes), len(groups))
    scales, zeros = (part[:, groups[:, 0]].expand(shape) for part in (scales, zeros))
    if source.tensor.row_order is not None:
        codes, scales, zeros = (reorder_rows(part, source.tensor.row_order) for part in (codes, scales, zeros))
    return W4Weight(pack(codes, kept), join_scales(scales, zeros), order)


def _not_in_four_bits(info: TensorInfo) -> LoadError:
    return LoadError(
        f"{info.file}: tensor {info.name} is stored as {info.dtype}, and config.json does not name it among those that "
        "are not in 4 bits: use quantization: none"
    )
