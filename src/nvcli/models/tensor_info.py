"""TensorInfo: where in a checkpoint's files a tensor is, and how it is stored. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from nvcli.errors import LoadError

WORD_BITS = 32

Numbers = Literal["integer", "fp8", "fp4"]
"""The kind of a code: an integer, or a floating-point number of 8 (e4m3) or 4 bits (e2m1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Several codes stored under one index of a tensor."""

    bits: int
    """The size of a code."""
    dim: Literal[0, 1]
    """The dimension of the weight [out, in] along which neighbours are packed together."""
    per_index: int
    """The number of codes per index."""
    block_size: int = 1
    """The number of elements of the file's tensor that they fill, which then form its last dimension."""
    order: tuple[int, ...] | None = None
    """The position of each code of a word among its neighbours, from the lowest bits up; None: in order."""

    has_quarters: bool = False
    """Whether the four codes of a byte are of rows that are a quarter of all rows apart, and not of neighbours."""

    @classmethod
    def in_words(cls, bits: int, dim: Literal[0, 1], order: tuple[int, ...] | None = None) -> Packing:
        """Return the packing into words of 32 bits."""
        return cls(bits=bits, dim=dim, per_index=WORD_BITS // bits, order=order)


TERNARY = Packing(bits=2, dim=0, per_index=4, has_quarters=True)
"""Numbers -1, 0 and 1, stored as 0, 1 and 2 (BitNet)."""


class Codes(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The decoding of a quantised weight's codes: (code - zero) × scale."""

    numbers: Numbers
    block: tuple[int, int]
    """(rows, columns) that share a scale; 0 columns: those with the same number in `groups`."""
    scales: TensorInfo
    """Floating-point numbers, or exponents of 2 where they are stored as integers (`kernels/mxfp4.py`)."""
    zeros: TensorInfo | None = None
    """One for each scale; None: all codes have the zero `zero`."""
    zero: int = 0
    """A number that is added to stored zeros."""
    groups: TensorInfo | None = None
    """The number of each column's group, if the columns of a group are not contiguous."""
    factor: TensorInfo | None = None
    """A number by which all scales are multiplied."""
    divides: bool = False
    """Whether they are divided by it instead."""
    unit: float = 1.0
    """A number by which all scales of the format are multiplied."""
    columns: TensorInfo | None = None
    """A number for each column, by which the values are multiplied."""

    @property
    def has_small_scales(self) -> bool:
        """Whether scales have few bits: powers of 2, or numbers times a factor."""
        return self.factor is not None or self.scales.dtype == "U8"

    @property
    def is_signed(self) -> bool:
        """Whether scales may be below 0, as some tools write them for integers, which have one more number there."""
        return self.numbers == "integer"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatCodes:
    """The decoding of codes that are places in a table, two in a byte, with a scale for each block of the flattened
    weight (`flat_codes.py`)."""

    num_codes: int
    table: TensorInfo
    scales: TensorInfo
    """Numbers, or places in `nested_table`."""
    state: TensorInfo
    """The description of the weight: JSON, in bytes."""
    nested_table: TensorInfo | None = None
    nested_scales: TensorInfo | None = None


MXFP4 = "MXFP4"
"""ggml's name of blocks of FP4 with an exponent."""
MXFP4_GROUP = 32
"""How many codes such a block has."""


class GGUFOrder(msgspec.Struct, frozen=True, gc=False):
    """The order of rows or columns in a GGUF file: from the place `start` on, those that the model has as
    [outer, groups, members, size] lie as [outer, members, groups, size]."""

    groups: int
    members: int
    size: int = 1
    start: int = 0

    @property
    def unit(self) -> int:
        """How many rows or columns change places with each other alone."""
        return self.groups * self.members * self.size


class GGUFForm(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Changes that a GGUF file has made to a tensor (`gguf/values.py`)."""

    blocks: str | None = None
    """ggml's name of the blocks of codes that its rows consist of; None: its numbers are plain."""
    rows: GGUFOrder | None = None
    """The order of its rows; None: they are where they belong."""
    columns: GGUFOrder | None = None
    offset: float = 0.0
    """A number that is added to the values."""
    is_power: bool = False
    """Whether numbers are stored as -exp(number)."""
    parts: tuple[TensorInfo, TensorInfo] | None = None
    """The two tensors that the projection from latents is stored in (`gguf/values.py`): that of keys, transposed for
    each head, [heads × latents, numbers of a key], and that of values, [heads × numbers of a value, latents]."""


class RowPlaces(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The places of a weight's rows among those of a tensor that may fuse it with others, or among the features of an
    adapter's matrix."""

    first: int = 0
    """The place of the weight's first row."""
    block: int = 1
    """The number of rows that lie together."""
    step: int = 1
    """The distance between the first rows of these blocks."""

    @property
    def is_whole(self) -> bool:
        """Whether all rows lie together."""
        return self.block == self.step

    def of(self, row: int) -> int:
        """Return the place of a row."""
        return self.first + row // self.block * self.step + row % self.block

    def span(self, rows: slice) -> slice:
        """Return the places from the first to the last of some rows, which are not none."""
        return slice(self.of(rows.start), self.of(rows.stop - 1) + 1)


ALL_ROWS = RowPlaces()
"""The places of the rows of a tensor that is all one weight."""


def fused_places(lengths: Sequence[int], num_groups: int = 1) -> list[RowPlaces]:
    """Return the places of the parts of a fused tensor, which have this many rows: one after the other, or some rows of
    each in every one of equal groups."""
    if num_groups == 1:
        return [RowPlaces(first=sum(lengths[:number])) for number in range(len(lengths))]
    blocks, step = [length // num_groups for length in lengths], sum(lengths) // num_groups
    return [RowPlaces(first=sum(blocks[:number]), block=block, step=step) for number, block in enumerate(blocks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankChange:
    """A change of a weight W [out, in] by an adapter: W + scaling × upᵀ down.

    With `magnitude` (DoRA) the rows of the sum are rescaled to these lengths.
    """

    up: TensorInfo
    """[rank, all features], some of which are those of the weight's rows."""
    down: TensorInfo
    """[rank, in]."""
    scaling: float
    features: RowPlaces
    magnitude: TensorInfo | None = None
    """[all features]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasChange:
    """A change of a bias b [out] by an adapter: b + scaling × values."""

    values: TensorInfo
    """[all features]."""
    scaling: float
    features: RowPlaces


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsChange:
    """A change of an embedding by an adapter: rows that are replaced."""

    rows: tuple[int, ...]
    values: TensorInfo
    """The new rows, [len(rows), hidden]."""


@dataclass(frozen=True, slots=True)
class TernaryChange:
    """A change of a weight to -1, 0 and 1 times the mean of its magnitudes (BitNet)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsFactor:
    """A change of a weight whose rows are multiplied by factors."""

    values: TensorInfo
    """[rows]."""
    scaling: float
    """A number by which these are multiplied."""
    is_squared: bool
    """Whether the rows are multiplied by the squares of the products."""


WeightChange = RowsFactor | TernaryChange | LowRankChange | BiasChange | RowsChange


class FileRange(NamedTuple):
    """Bytes of a file from `begin` to before `end`."""

    file: Path
    begin: int
    end: int


class StoredTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor in a safetensors file."""

    offset: int
    """The offset of its data in the file, in bytes."""
    shape: tuple[int, ...]
    dtype: str
    """safetensors' name."""


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A tensor in a safetensors file, as its header describes it, or some of its rows [out, in].

    A checkpoint has up to 100,000, so they are cheap to make, and no work for the collector of garbage.
    """

    file: Path
    name: str
    """Its name in the file."""
    shape: tuple[int, ...]
    """For codes, the shape of the weight."""
    dtype: str
    """safetensors' name: F32, BF16, …, or ggml's of blocks of codes."""
    num_bytes: int
    stored: StoredTensor | None = None
    """The file's tensor as its header has it, or as a vector without dimensions of 1; None where none was read."""
    rows: RowPlaces = ALL_ROWS
    """The places of its rows in the file's tensor."""
    expert: int | None = None
    """The expert's number, if the file's tensor stacks the matrices of all experts."""
    is_transposed: bool = False
    """Whether the file's matrices are [in, out]."""
    first_column: int = 0
    """The place of its first column among those of the file's tensor."""
    packing: Packing | None = None
    """How codes are packed; None: each has an index of its own."""
    codes: Codes | None = None
    """The decoding of its numbers, if they are the codes of a quantised weight."""
    flat: FlatCodes | None = None
    """The decoding of its numbers, if they are the codes of a flattened weight."""
    form: GGUFForm | None = None
    """Changes that a GGUF file has made to it; None: there are none."""
    has_ones: bool = False
    """Whether a dimension of 1 follows each of the dimensions in the file."""
    changes: tuple[WeightChange, ...] = ()
    """Changes by an adapter, in this order (`adapters/merge.py`)."""

    @property
    def has_small_scales(self) -> bool:
        """Whether its numbers have scales of few bits."""
        if self.codes is not None:
            return self.codes.has_small_scales
        return self.form is not None and self.form.blocks == MXFP4

    def seen_as(self, dtype: str) -> TensorInfo:
        """Return the same bytes as numbers of another type of the same size."""
        stored = None if self.stored is None else replace(self.stored, dtype=dtype)
        return replace(self, dtype=dtype, stored=stored)

    def error(self, problem: str) -> LoadError:
        """Return the error that names the file, the tensor and what is wrong with it."""
        return LoadError(f"{self.file}: tensor {self.name} {problem}")
