"""OpenFiles: the values of a checkpoint's tensors, read piece by piece from the files that hold them.

Whatever the format of a quantised weight, its codes, zeros and scales are read as matrices of the requested part, and
its values are (code - zero) × scale.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nvcli.core.system.regular_file import open_regular
from nvcli.errors import LoadError
from nvcli.kernels.fp8_types import FP8, numbers
from nvcli.kernels.mxfp4 import numbers_of_bytes, powers_of_scales
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.flat_codes import read_flat
from nvcli.models.gguf.blocks import KeptCodes
from nvcli.models.gguf.values import read_codes, read_form
from nvcli.models.pinned_upload import PinnedUpload
from nvcli.models.safetensors_header import SUFFIX
from nvcli.models.seen_scales import SeenScales
from nvcli.models.tensor_info import ALL_ROWS, MXFP4_GROUP, FileRange, Packing, RowPlaces, StoredTensor, TensorInfo

TORCH_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": FP8,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""torch's types by safetensors' names."""


class StoredPart(NamedTuple):
    """A part of a quantised weight [rows, columns] as a checkpoint has it."""

    codes: Tensor
    """[rows, columns]: uint8 where they are packed."""
    scales: Tensor
    """[rows or blocks of rows or 1, groups]: float32, or uint8 where they are exponents."""
    zeros: Tensor | None
    """Zeros in float32, one for each scale, or one for all [1, 1]."""
    group_of: Tensor
    """The group of each column, [columns]."""


@contextmanager
def reading(*files: Path) -> Iterator[None]:
    """Turn what files raise that cannot be read into LoadError, which names them."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{' or '.join(map(str, files))}: cannot be read ({error}); download it again") from None


class OpenFiles:
    """The files of a checkpoint that one thread reads, each opened once. They are closed at the end of a `with`.

    A part of a tensor is some of its rows, or rows and columns. Every read raises SafetensorError or OSError for files
    that cannot be read, and LoadError if a column's group index is out of range. The end of a `with` raises LoadError
    if scales were read that are none.
    """

    def __init__(self, upload: PinnedUpload | None = None) -> None:
        """With `upload`, values are on its GPU as soon as they are read."""
        self._stack = ExitStack()
        self._handles: dict[Path, Any] = {}
        self._mapped: dict[Path, Tensor] = {}
        """The bytes of files that are no safetensors."""
        self._upload = upload
        self.scales = SeenScales()
        """The scales of the weights that were read."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        self._handles.clear()
        self._mapped.clear()
        self._stack.close()
        if self._upload is not None:
            self._upload.close()
        if kind is None:
            self.scales.check()

    def read(self, info: TensorInfo, part: Sequence[slice], device: torch.device) -> Tensor:
        """Read the values of a part that is not empty: [rows, columns] or [rows].

        Values that are computed or rearranged first are on `device`, where they may be strided; others may be on the
        CPU.
        """
        if info.flat is not None or info.form is not None:
            decode = read_form if info.flat is None else read_flat
            held = info.rows.span(part[0]), *part[1:]
            return take_rows(decode(self, replace(info, rows=ALL_ROWS), held, device), info.rows, part[0])
        if info.codes is None:
            return self._read_stored(info, part, device)
        values = self._read_coded(info, part, device)
        if info.codes.columns is None:
            return values
        factors = self._slice(info.codes.columns, (part[1],)).to(device).float()
        self.scales.add([info.codes.columns], factors)
        return values.float() * factors

    def read_stored(self, info: TensorInfo, part: Sequence[slice]) -> Tensor:
        """Read a part of the tensor in a file as it is stored, on whichever device."""
        return self._slice(info, part)

    def read_together(self, infos: Sequence[TensorInfo], part: Sequence[slice]) -> Tensor:
        """Read the same rows and columns of matrices that are stored alike, as they are stored, on whichever device:
        [matrices × rows, columns]; with an empty `part`, single numbers: [numbers]."""
        first = infos[0].stored
        if self._upload is None or first is None:
            return torch.cat([self._slice(info, part) if part else self._slice(info, ()).view(1) for info in infos])
        data = self._upload.read_parts(ranges_of(infos, part)).view(TORCH_TYPES[first.dtype])
        return data.view(-1, *first.shape[1:])[:, *part[1:]] if part else data

    def _read_coded(self, info: TensorInfo, part: Sequence[slice], device: torch.device) -> Tensor:
        """Read the values of a part of a quantised weight, without the factors of columns."""
        assert info.codes is not None
        codes, scales, zeros, group_of = self.read_codes(info, part, device, decodes_fp4=info.codes.numbers == "fp4")
        if scales.dtype == torch.uint8:
            scales = powers_of_scales(scales)
        high, wide = info.codes.block
        rows, columns = info.rows.span(part[0]), part[1]
        if info.rows.is_whole and wide and scales.shape[1] > 1 and _is_whole(rows, high) and _is_whole(columns, wide):
            tiles = codes.reshape(-1, high, scales.shape[1], wide)
            zeros = zeros if zeros is None else zeros[:, None, :, None]
            return scale_codes(tiles, scales[:, None, :, None], zeros).view(codes.shape)
        row_of = take_rows(_blocks_of(rows, high, device), info.rows, part[0]) if high > 1 else None
        zeros = zeros if zeros is None else _spread(zeros, row_of, group_of)
        return scale_codes(codes, _spread(scales, row_of, group_of), zeros)

    def read_codes(
        self, info: TensorInfo, part: Sequence[slice], device: torch.device, *, decodes_fp4: bool = False
    ) -> StoredPart:
        """Read a part of a quantised weight. `decodes_fp4`: codes of FP4 become numbers in bfloat16."""
        if info.form is not None:
            codes, scales, _ = self.read_blocks(info, part, device, MXFP4_GROUP)
            return StoredPart(codes, scales, None, _blocks_of(part[1], MXFP4_GROUP, device))
        assert info.codes is not None
        columns, (_, wide) = part[1], info.codes.block
        codes = self._read_stored(info, part, device, decodes_fp4=decodes_fp4).to(device)
        if info.codes.groups is None:
            groups = slice(columns.start // wide, ceil_div(columns.stop, wide))
            group_of = _blocks_of(columns, wide, device)
        else:
            groups = slice(0, info.codes.scales.shape[-1])
            group_of = self._read_groups(info.codes.groups, columns, info.codes.scales).to(device)
        scales = self._read_grid(info, info.codes.scales, part[0], groups, device)
        zeros = None if info.codes.zero == 0 else torch.full((1, 1), float(info.codes.zero), device=device)
        if info.codes.zeros is not None:
            stored = self._read_grid(info, info.codes.zeros, part[0], groups, device).float()
            zeros = stored if zeros is None else stored + zeros
        scales = scales if scales.dtype == torch.uint8 else scales.float() * info.codes.unit
        self.scales.add([info.codes.scales], scales, is_signed=info.codes.is_signed)
        if (factor := self.read_factor(info, device)) is not None:
            scales = scales * factor
        return StoredPart(codes, scales, zeros, group_of)

    def read_blocks(self, info: TensorInfo, part: Sequence[slice], device: torch.device, group: int) -> KeptCodes:
        """Read a part of a weight in blocks of a GGUF file that ranks can keep, with scales for each `group` columns of
        it, all of which share one."""
        held = info.rows.span(part[0]), part[1]
        codes, scales, offsets = read_codes(self, replace(info, rows=ALL_ROWS), held, device, group)
        if offsets is None:
            self.scales.add([replace(info, dtype="U8")], scales)
        else:
            self.scales.add([info], torch.stack((scales, offsets)), is_signed=True)
            offsets = take_rows(offsets, info.rows, part[0])
        return KeptCodes(take_rows(codes, info.rows, part[0]), take_rows(scales, info.rows, part[0]), offsets)

    def read_factor(self, info: TensorInfo, device: torch.device) -> Tensor | None:
        """Read the number by which all scales of a quantised weight are multiplied, in float32; None: there is none."""
        if info.codes is None or info.codes.factor is None:
            return None
        shape = info.codes.factor.shape
        factor = self._slice(info.codes.factor, [slice(None)] * len(shape)).to(device).float().view(())
        self.scales.add([info.codes.factor], factor, is_divisor=info.codes.divides)
        return factor.reciprocal() if info.codes.divides else factor

    def _read_grid(
        self, info: TensorInfo, grid: TensorInfo, rows: slice, groups: slice, device: torch.device
    ) -> Tensor:
        """Read the scales or zeros of some rows and groups: [rows or blocks of rows or 1, groups or 1]."""
        assert info.codes is not None
        grid, high = replace(grid, expert=info.expert), info.codes.block[0]
        if all(length == 1 for length in grid.shape):
            return self._slice(grid, [slice(None)] * len(grid.shape)).to(device).view(1, 1)
        if high == 1:
            grid = replace(grid, rows=info.rows)
        else:
            stored = info.rows.span(rows)
            rows = slice(stored.start // high, ceil_div(stored.stop, high))
        part = (rows,) if len(grid.shape) == 1 else (rows, slice(0, 1) if grid.shape[-1] == 1 else groups)
        return self._read_stored(grid, part, device).to(device).view(rows.stop - rows.start, -1)

    def _read_groups(self, groups: TensorInfo, columns: slice, scales: TensorInfo) -> Tensor:
        """Read the number of the group that each column belongs to."""
        found, count = self._slice(groups, (columns,)), scales.shape[-1]
        if int(found.min()) < 0 or int(found.max()) >= count:
            raise groups.error(
                f"has groups from {int(found.min())} to {int(found.max())}, and {scales.name} has {count} groups; "
                "download it again"
            )
        return found

    def _read_stored(
        self, info: TensorInfo, part: Sequence[slice], device: torch.device, *, decodes_fp4: bool = False
    ) -> Tensor:
        """Read the numbers of a part as they are stored, unpacked and each at its place: [rows, columns] or [rows]."""
        held, packing = [info.rows.span(part[0]), *part[1:]], info.packing
        if packing is not None and packing.has_quarters:
            stored = self._slice(info, (slice(0, info.shape[0] // packing.per_index), held[1])).to(device)
            rows = torch.cat([stored >> shift & 3 for shift in range(0, 8, packing.bits)])
            return take_rows(rows[held[0]], info.rows, part[0])
        first = length = 0
        if info.first_column:
            held[1] = slice(held[1].start + info.first_column, held[1].stop + info.first_column)
        if packing is not None:
            wanted = held[packing.dim]
            first, length = wanted.start % packing.per_index, wanted.stop - wanted.start
            held[packing.dim] = slice(wanted.start // packing.per_index, ceil_div(wanted.stop, packing.per_index))
        values = self._slice(info, held[::-1] if info.is_transposed else held)
        if packing is not None:
            values = values.to(device).flatten(1)
            dim = 1 - packing.dim if info.is_transposed else packing.dim
            values = numbers_of_bytes(values) if decodes_fp4 else unpack(values, packing, dim)
            values = values.narrow(dim, first, length)
        values = values.to(device).t() if info.is_transposed else values
        return take_rows(values, info.rows, part[0])

    def _slice(self, info: TensorInfo, part: Sequence[slice | int]) -> Tensor:
        """Read a part of the tensor in a file, or of one expert's; no slices for a single number."""
        if info.has_ones:
            part = [index for one in part for index in (one, 0)]
        if self._upload is not None and info.stored is not None:
            if part and info.stored.shape:
                return self._read_rows(self._upload, info, info.stored, part)
            return self.read_together([info], ()).view([1] * len(part))
        values = self._slice_of_file(info, part)
        dtype = None if info.stored is None else TORCH_TYPES.get(info.stored.dtype)
        return values if dtype is None or values.dtype == dtype else values.view(dtype)

    def _slice_of_file(self, info: TensorInfo, part: Sequence[slice | int]) -> Tensor:
        """Do what `_slice` does, on the CPU and in the type that the file says."""
        expert = [] if info.expert is None else [info.expert]
        if info.stored is not None and info.file.suffix != SUFFIX:
            mapped = self._map(info.file, info.stored)
            return mapped[*expert, *part].clone() if mapped.dim() or not part else mapped.clone().view(1)
        if not part:
            scalar: Tensor = self._handle(info).get_tensor(info.name)
            return scalar
        stored = self._handle(info).get_slice(info.name)
        if not stored.get_shape():
            return self._slice_of_file(info, ()).view(1)
        if info.stored is not None and tuple(stored.get_shape()) != info.stored.shape:
            vector: Tensor = self._handle(info).get_tensor(info.name)
            return vector.view(info.stored.shape)[*part]
        values: Tensor = stored[*expert, *part]
        return values

    def _read_rows(
        self, upload: PinnedUpload, info: TensorInfo, stored: StoredTensor, part: Sequence[slice | int]
    ) -> Tensor:
        """Read a part with whole rows, and cut the other dimensions on the GPU."""
        rows, *others = part
        assert isinstance(rows, slice)
        dtype = TORCH_TYPES[stored.dtype]
        shape = stored.shape if info.expert is None else stored.shape[1:]
        begin, end, _ = rows.indices(shape[0])
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        first = (info.expert or 0) * shape[0] + begin
        data = upload.read(info.file, stored.offset + first * row_bytes, (end - begin) * row_bytes)
        return data.view(dtype).view(-1, *shape[1:])[:, *others]

    def _handle(self, info: TensorInfo) -> Any:
        if info.file not in self._handles:
            handle = safe_open(info.file, framework="pt", device="cpu")
            self._handles[info.file] = self._stack.enter_context(handle)
        return self._handles[info.file]

    def _map(self, file: Path, stored: StoredTensor) -> Tensor:
        """Return a tensor as it lies in a file of torch.save, not to be written to."""
        if file not in self._mapped:
            with open_regular(file) as opened:
                memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            self._mapped[file] = torch.frombuffer(memory, dtype=torch.uint8)
        dtype = TORCH_TYPES[stored.dtype]
        end = stored.offset + math.prod(stored.shape) * dtype.itemsize
        if end > len(self._mapped[file]):
            raise OSError(f"it ends at byte {len(self._mapped[file]):,}")
        data = self._mapped[file][stored.offset : end]
        aligned = data if stored.offset % dtype.itemsize == 0 else data.clone()
        return aligned.view(dtype).view(stored.shape)


def ranges_of(infos: Sequence[TensorInfo], part: Sequence[slice]) -> list[FileRange]:
    """Return where files have some rows of tensors that are stored alike, each alone; with an empty `part`, their first
    numbers."""
    stored = [(info.file, info.stored.offset) for info in infos if info.stored is not None]
    first = infos[0].stored
    assert first is not None
    row_bytes = math.prod(first.shape[1:] if part else ()) * TORCH_TYPES[first.dtype].itemsize
    begin, end = (part[0].start * row_bytes, part[0].stop * row_bytes) if part else (0, row_bytes)
    return [FileRange(file, offset + begin, offset + end) for file, offset in stored]


def take_rows(values: Tensor, places: RowPlaces, rows: slice, dim: int = 0) -> Tensor:
    """Return some rows of a weight from what lies between the first and the last of them, along `dim`."""
    if places.is_whole:
        return values
    if places.block == 1:
        return values[:: places.step] if dim == 0 else values[..., :: places.step]
    wanted = torch.arange(rows.start, rows.stop, device=values.device)
    wanted = wanted // places.block * places.step + wanted % places.block
    stored = values.view(torch.uint8) if values.dtype == FP8 else values  # no numbers in FP8 can be indexed
    return stored.index_select(dim, wanted - wanted[0]).view(values.dtype)


def unpack(words: Tensor, packing: Packing, dim: int) -> Tensor:
    """Unpack the codes of words or bytes, those of each word in sequence along `dim`: with n codes per word, [A, B] →
    uint8 [A × n, B] for dim 0 and [A, B × n] for dim 1."""
    shifts = torch.arange(0, 8 * words.element_size(), packing.bits, dtype=words.dtype, device=words.device)
    if packing.order is not None:
        shifts = shifts[torch.tensor(packing.order, device=words.device).argsort()]
    shape = (1, -1, 1) if dim == 0 else (1, 1, -1)
    codes = (words.unsqueeze(1 + dim) >> shifts.view(shape)) & ((1 << packing.bits) - 1)
    return codes.to(torch.uint8).flatten(dim, dim + 1)


def scale_codes(codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Compute (codes - zeros) × scales, in float32, or in bfloat16 if both are in it, which is exact for FP4. codes: of
    any shape; scales, zeros: as large, or 1 in dimensions that share them."""
    if codes.dtype == scales.dtype:
        return codes * scales
    values = numbers(codes) if codes.dtype == FP8 else codes.float()  # a copy
    return (values if zeros is None else values.sub_(zeros)).mul_(scales)


def _is_whole(part: slice, size: int) -> bool:
    """Whether a part consists of whole blocks of `size`."""
    return bool(part.start % size == 0 and part.stop % size == 0)


def _blocks_of(part: slice, size: int, device: torch.device) -> Tensor:
    """Return the block number of each index of a part, counted from the part's first block."""
    return torch.arange(part.start, part.stop, device=device).floor_divide_(size).sub_(part.start // size)


def _spread(grid: Tensor, row_of: Tensor | None, group_of: Tensor) -> Tensor:
    """Expand a grid to one number per row and column; a dimension of size 1 is shared by all."""
    grid = grid if row_of is None or len(grid) == 1 else grid[row_of]
    return grid if grid.shape[1] == 1 else grid[:, group_of]
