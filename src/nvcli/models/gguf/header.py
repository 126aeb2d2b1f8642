"""The header of a GGUF file: its metadata, and which tensors it holds, and where. Torch-free; no weights are read.

The format (github.com/ggml-org/ggml/blob/master/docs/gguf.md): `GGUF`, a version, two counts, keys with typed values,
the tensors' names, shapes, types and offsets, then, aligned, their data. The library `gguf` makes an array of every
string of a vocabulary, which takes it tens of seconds; here they are passed over where they are not asked for.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nvcli.core.system.regular_file import open_regular
from nvcli.core.validation import show
from nvcli.errors import LoadError
from nvcli.models.gguf.types import TENSOR_TYPES, TensorType
from nvcli.models.json_file import GET_LFS, GIT_LFS
from nvcli.models.safetensors_header import unreadable

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT = "general.alignment"
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of `struct` by the types of values."""
_LENGTH = struct.Struct("<Q").unpack_from
_MOST_TEXTS = 256
"""Longer arrays of texts are vocabularies."""
_MOST_DIMENSIONS = 4
_DAMAGED = (struct.error, ValueError, OverflowError, MemoryError)
"""Exceptions of walking through a damaged header."""


class GGUFTensor(NamedTuple):
    """A tensor in the file, with its dimensions as in safetensors: the last one's neighbours lie side by side."""

    file: Path
    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    """The place of its data in the file."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    file: Path
    metadata: Mapping[str, Any]
    """The keys with numbers, texts or lists of them; without vocabularies, unless these were asked for."""
    tensors: Mapping[str, GGUFTensor]

    def tensor(self, name: str) -> GGUFTensor:
        """Return a tensor. Raises LoadError if it is missing."""
        if name not in self.tensors:
            raise LoadError(f"{self.file}: tensor {name} is missing; download the file again")
        return self.tensors[name]

    def read_floats(self, name: str) -> list[float]:
        """Read a small tensor in float32. Raises LoadError if it is missing, empty or of another type."""
        tensor = self.tensor(name)
        if not tensor.num_bytes:
            raise LoadError(f"{tensor.file}: tensor {name} is empty; download the file again")
        if tensor.type.name != "F32":
            raise LoadError(f"{tensor.file}: tensor {name} is stored as {tensor.type.name}, and belongs in F32")
        with open_regular(tensor.file) as stream:
            stream.seek(tensor.offset)
            values = struct.unpack(f"<{tensor.num_bytes // 4}f", stream.read(tensor.num_bytes))
        return [*map(_shortest, values)]


def read_header(file: Path, *, with_vocabulary: bool = False) -> GGUFHeader:
    """Read the header of one file. Raises LoadError for a missing, truncated or corrupt file, and for one of another
    version or byte order."""
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(len(GIT_LFS))
            _check_start(file, start, size)
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Walk(file, data, with_vocabulary).header()
    except OSError as error:
        raise unreadable(file, error) from None


def _check_start(file: Path, start: bytes, size: int) -> None:
    if start == GIT_LFS:
        raise LoadError(f"{file}: {GET_LFS}")
    if not start.startswith(_MAGIC) or size < 24:
        raise LoadError(f"{file}: truncated or not a GGUF file ({size:,} bytes); download it again")
    (version,) = struct.unpack_from("<I", start, 4)
    if version in _VERSIONS:
        return
    if version & 0xFFFF == 0:
        raise LoadError(
            f"{file}: its numbers have the other byte order (big-endian): give the file for little-endian machines, or "
            "convert it with llama.cpp's gguf_convert_endian.py"
        )
    raise LoadError(f"{file}: GGUF version {version}; supported: {' and '.join(map(str, _VERSIONS))}")


class _Walk:
    """Goes through a header from its first byte to its last."""

    def __init__(self, file: Path, data: mmap.mmap, with_vocabulary: bool) -> None:
        self._file = file
        self._data = data
        self._with_vocabulary = with_vocabulary
        self._place = 8

    def header(self) -> GGUFHeader:
        metadata: dict[str, Any] = {}
        try:
            num_tensors, num_keys = self._take("Q"), self._take("Q")
            for _ in range(num_keys):
                key = self._text()
                metadata[key] = self._value(self._take("I"))
            entries = [self._entry() for _ in range(num_tensors)]
            alignment = metadata.get(_ALIGNMENT, 32)
            if not isinstance(alignment, int) or alignment <= 0:
                raise ValueError(f"`{_ALIGNMENT}` is {show(alignment)}")
        except _DAMAGED as error:
            raise LoadError(
                f"{self._file}: truncated or corrupt: its header ends early or makes no sense ({error}); download it "
                "again"
            ) from None
        start = self._place + -self._place % alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, dimensions, number, offset in entries:
            if name in tensors:
                raise LoadError(f"{self._file}: corrupt: tensor {show(name)} is there twice; download the file again")
            tensors[name] = self._tensor(name, dimensions[::-1], number, start + offset)
        return GGUFHeader(self._file, metadata, tensors)

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> GGUFTensor:
        """Describe a tensor of the data. Raises LoadError for a type that is unknown, and for data that is cut off."""
        found = TENSOR_TYPES.get(number)
        if found is None:
            raise LoadError(
                f"{self._file}: tensor {show(name)} has a type that is not known (ggml's number {number}): choose "
                "another quantisation of the model, such as Q4_K_M"
            )
        columns = shape[-1] if shape else 1
        if columns % found.block:
            raise LoadError(
                f"{self._file}: corrupt: rows of tensor {show(name)} have {columns:,} numbers, and {found.name} has "
                f"blocks of {found.block}; download the file again"
            )
        num_bytes = math.prod(shape) // found.block * found.block_bytes
        if offset + num_bytes > len(self._data):
            raise LoadError(
                f"{self._file}: truncated: tensor {show(name)} ends at byte {offset + num_bytes:,}, and the file has "
                f"{len(self._data):,}; download it again"
            )
        return GGUFTensor(self._file, name, shape, found, offset, num_bytes)

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, count = self._text(), self._take("I")
        if not 0 < count <= _MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {count} dimensions")
        dimensions = self._take_many(f"<{count}Q")
        number, offset = self._take_many("<IQ")
        return name, dimensions, number, offset

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind != _ARRAY:
            found = self._take(_format(kind))
            return _shortest(found) if kind == _FLOAT32 else found
        kind, count = self._take("I"), self._take("Q")
        if kind != _STRING:
            return [*self._take_many(f"<{count}{_format(kind)}")]
        if count > _MOST_TEXTS and not self._with_vocabulary:
            place, data = self._place, self._data  # a call for each of a million texts takes half a second
            for _ in range(count):
                place += 8 + _LENGTH(data, place)[0]
            self._place = place
            return None
        return [self._text() for _ in range(count)]

    def _text(self) -> str:
        length = self._take("Q")
        start, self._place = self._place, self._place + length
        if self._place > len(self._data):
            raise ValueError(f"a text of {length:,} bytes")
        return self._data[start : self._place].decode()

    def _take(self, form: str) -> Any:
        return self._take_many(f"<{form}")[0]

    def _take_many(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._data, self._place)
        self._place += struct.calcsize(form)
        return found


def _shortest(value: float) -> float:
    """Return the number with the fewest digits that is this one in float32, as config.json had it."""
    numbers = (float(f"{value:.{digits}g}") for digits in range(6, 9))
    return next((number for number in numbers if struct.pack("<f", number) == struct.pack("<f", value)), value)


def _format(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"a value of type {kind}")
    return _NUMBERS[kind]
