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
        first = info.first_row + rows.start * info.row_step
        stored_rows = slice(first, first + (rows.stop - rows.start - 1) * info.row_step + 1)
        if info.packing is not None:
            return read_values(info, stored_rows, columns[0], self.reader(device))
        if info.scales is not None:
            return self._read_blocks(info, info.scales, stored_rows, columns[0], device)
        order = [*columns, stored_rows] if info.is_transposed else [stored_rows, *columns]
        values = self._slice(info, order)
        if info.is_transposed:
            values = values.to(device).t()
        return values[:: info.row_step]

    def reader(self, device: torch.device) -> ReadSlice:
        """Return a function that reads parts of tensors as they are in the files, to `device`."""
        return lambda info, part: self._slice(info, part).to(device)

    def _read_blocks(
        self, info: TensorInfo, scales: TensorInfo, rows: slice, columns: slice, device: torch.device
    ) -> Tensor:
        """Read MXFP4 blocks: all that hold some of the columns."""
        first = columns.start // MXFP4_BLOCK
        held = slice(first, -(-columns.stop // MXFP4_BLOCK))
        blocks, factors = (
            self._slice(one, (rows, held))[:: info.row_step].to(device)
            for one in (info, replace(scales, expert=info.expert))
        )
        skipped = first * MXFP4_BLOCK
        return dequantise(blocks, factors)[:, columns.start - skipped : columns.stop - skipped]

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
