"""OpenFiles: the values of a checkpoint's tensors, read piece by piece from the files that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from nvcli.kernels.expert_settings import MXFP4_BLOCK
from nvcli.kernels.mxfp4 import dequantise
from nvcli.models.quantised_values import ReadSlice, read_values
from nvcli.models.safetensors_header import TensorInfo


class OpenFiles:
    """The files of a checkpoint that one thread reads, each opened once. They are closed at the end of a `with`."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._handles: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._handles.clear()
        self._stack.close()

    def read(self, info: TensorInfo, part: Sequence[slice], device: torch.device) -> Tensor:
        """Read the rows and columns `part` of a tensor, of which there are some: the values as [rows, columns] or
        [rows].

        What has to be rearranged first is moved to `device` and may be strided there, the rest is on the CPU. Raises
        SafetensorError and OSError for files that cannot be read.
        """
        rows, *columns = part
        stored_rows = _stored_rows(info, rows)
        if info.packing is not None:
            return read_values(info, stored_rows, columns[0], self.reader(device))
        if info.scales is not None:
            return self._read_mxfp4(info, part, device)
        order = [*columns, stored_rows] if info.is_transposed else [stored_rows, *columns]
        values = self._slice(info, order)
        if info.is_transposed:
            values = values.to(device).t()
        return values[:: info.row_step]

    def reader(self, device: torch.device) -> ReadSlice:
        """Return a function that reads parts of tensors as they are in the files, to `device`."""
        return lambda info, part: self._slice(info, part).to(device)

    def read_blocks(self, info: TensorInfo, part: Sequence[slice], device: torch.device) -> tuple[Tensor, Tensor]:
        """Read the MXFP4 blocks that hold some of the rows and columns `part`, and their scales, as the file has them:
        [rows, blocks, 16] and [rows, blocks] uint8."""
        assert info.scales is not None
        rows, columns = _stored_rows(info, part[0]), part[1]
        held = slice(columns.start // MXFP4_BLOCK, -(-columns.stop // MXFP4_BLOCK))
        blocks, factors = (
            self._slice(one, (rows, held))[:: info.row_step].to(device)
            for one in (info, replace(info.scales, expert=info.expert))
        )
        return blocks, factors

    def _read_mxfp4(self, info: TensorInfo, part: Sequence[slice], device: torch.device) -> Tensor:
        columns = part[1]
        skipped = columns.start // MXFP4_BLOCK * MXFP4_BLOCK
        return dequantise(*self.read_blocks(info, part, device))[:, columns.start - skipped : columns.stop - skipped]

    def _slice(self, info: TensorInfo, part: Sequence[slice]) -> Tensor:
        """Read a part of the tensor in a file, or of one expert's; no slices for a single number."""
        if info.file not in self._handles:
            handle = safe_open(info.file, framework="pt", device="cpu")
            self._handles[info.file] = self._stack.enter_context(handle)
        if not part:
            scalar: Tensor = self._handles[info.file].get_tensor(info.name)
            return scalar
        expert = [] if info.expert is None else [info.expert]
        values: Tensor = self._handles[info.file].get_slice(info.name)[*expert, *part]
        return values


def _stored_rows(info: TensorInfo, rows: slice) -> slice:
    """Return the rows of the file's tensor among which some rows are."""
    first = info.first_row + rows.start * info.row_step
    return slice(first, first + (rows.stop - rows.start - 1) * info.row_step + 1)
