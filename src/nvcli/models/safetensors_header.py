"""The header of a safetensors file: which tensors it holds, and where. Torch-free; no weights are read.

The format: 8 bytes little-endian header length, JSON header, data (github.com/huggingface/safetensors).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from nvcli.core.system.regular_file import open_regular
from nvcli.core.validation import show
from nvcli.errors import LoadError
from nvcli.models.json_file import GET_LFS, GIT_LFS
from nvcli.models.tensor_info import StoredTensor, TensorInfo

SUFFIX = ".safetensors"
_MOST_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""
_METADATA = "__metadata__"
_POWERS, _EXPONENTS = "F8_E8M0", "U8"
"""The type of powers of 2, and that of their exponents, as which they are read."""


class _Entry(msgspec.Struct, frozen=True, gc=False):
    """The header's entry of a tensor, with the fields' names as there."""

    dtype: str
    shape: tuple[Annotated[int, Meta(ge=0)], ...]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Read the tensors of one safetensors file. Raises LoadError for a missing, truncated or corrupt file."""
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > size - 8:
                is_lfs = (start + stream.read(len(GIT_LFS))).startswith(GIT_LFS)
                problem = f"truncated or not a safetensors file ({size:,} bytes); download it again"
                raise LoadError(f"{file}: {GET_LFS if is_lfs else problem}")
            if length > _MOST_HEADER_BYTES:
                raise LoadError(
                    f"{file}: corrupt: a header of {length:,} bytes, more than the {_MOST_HEADER_BYTES:,} that "
                    "safetensors allows; download it again"
                )
            header = stream.read(length)
    except OSError as error:
        raise unreadable(file, error) from None

    tensors, expected = {}, 8 + length
    for name, entry in _parse(file, header).items():
        begin, end = entry.data_offsets
        if begin > end or end > size:
            raise LoadError(
                f"{file}: corrupt or truncated: its header places tensor {show(name)} at bytes {begin:,} to {end:,} of "
                f"the data, and the file has {size - 8 - length:,}; download it again"
            )
        dtype = _EXPONENTS if entry.dtype == _POWERS else entry.dtype
        tensors[name] = TensorInfo(
            file=file,
            name=name,
            shape=entry.shape,
            dtype=dtype,
            num_bytes=end - begin,
            stored=StoredTensor(8 + length + begin, entry.shape, dtype),
        )
        expected = max(expected, 8 + length + end)
    if size < expected:
        raise LoadError(f"{file}: truncated: {size:,} of {expected:,} bytes; download it again")
    if size > expected:  # safetensors itself refuses to open it
        raise LoadError(f"{file}: {size:,} bytes, and its header describes {expected:,}; download it again")
    return tensors


def unreadable(file: Path, error: OSError) -> LoadError:
    """Return the error for a weight file that cannot be opened."""
    if isinstance(error, FileNotFoundError):
        return LoadError(f"{file}: {error.strerror}, though the index of the weights or a link names it; download it")
    return LoadError(f"{file}: cannot be read: {error.strerror}; download it again")


def _parse(file: Path, header: bytes) -> dict[str, _Entry]:
    """Return the entry of each tensor. Raises LoadError."""
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    except RecursionError:
        raise LoadError(f"{file}: corrupt: its header is nested too deeply; download it again") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LoadError(
            f"{file}: corrupt: its header is not a valid JSON object ({error}); download it again"
        ) from None
    decoder = msgspec.json.Decoder(_Entry)
    tensors = {}
    for name, raw in entries.items():
        if name == _METADATA:
            continue
        try:
            tensors[name] = decoder.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise LoadError(
                f"{file}: corrupt: its header's entry {show(name)} is malformed ({error}); download it again"
            ) from None
    return tensors
