"""The header of a file that torch.save wrote: which tensors it holds, and where. Torch-free; no weights are read.

The format (since torch 1.6): a zip archive whose entries are not compressed. `data.pkl`, a pickle, describes tensors as
views of storages, each of which is an entry `data/KEY`. The pickle is not run: what it may build are dictionaries of
tensors and plain values, and whatever else it names is an error.
"""

from __future__ import annotations

import math
import os
import pickletools
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from nvcli.core.system.regular_file import open_regular
from nvcli.core.validation import show
from nvcli.errors import LoadError
from nvcli.models.json_file import GET_LFS, GIT_LFS
from nvcli.models.safetensors_header import unreadable
from nvcli.models.tensor_info import StoredTensor, TensorInfo

_MOST_PICKLE_BYTES = 64 << 20
_LOCAL_HEADER = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_STORAGES = {
    "torch DoubleStorage": ("F64", 8),
    "torch FloatStorage": ("F32", 4),
    "torch HalfStorage": ("F16", 2),
    "torch BFloat16Storage": ("BF16", 2),
    "torch LongStorage": ("I64", 8),
    "torch IntStorage": ("I32", 4),
    "torch ShortStorage": ("I16", 2),
    "torch CharStorage": ("I8", 1),
    "torch ByteStorage": ("U8", 1),
    "torch BoolStorage": ("BOOL", 1),
}
"""safetensors' names of types, and the bytes of a number, by the classes of storages."""
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = frozenset(
    (
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING"),
    )
)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_DAMAGED = (
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    EOFError,
    RuntimeError,
    OverflowError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
)
"""Exceptions of a damaged archive, and of walking what it describes."""
_SAVE = "save the model with transformers' save_pretrained"


class _Name(NamedTuple):
    """A class or function that a pickle names, as `module name`."""

    name: str


class _Storage(NamedTuple):
    dtype: str
    item_bytes: int
    key: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch_file(file: Path) -> dict[str, TensorInfo]:
    """Read the tensors of one file. Raises LoadError for a missing, truncated or corrupt file, for one of another
    form, and for one that names anything but tensors."""
    try:
        with open_regular(file) as stream:
            return _read(file, stream)
    except OSError as error:
        raise unreadable(file, error) from None


def _read(file: Path, stream: BinaryIO) -> dict[str, TensorInfo]:
    size = os.fstat(stream.fileno()).st_size
    if stream.read(len(GIT_LFS)) == GIT_LFS:
        raise LoadError(f"{file}: {GET_LFS}")
    try:
        archive = zipfile.ZipFile(stream)
        entries = {entry.filename: entry for entry in archive.infolist()}
        name = next((name for name in entries if name.rpartition("/")[2] == "data.pkl"), None)
        if name is None or entries[name].file_size > _MOST_PICKLE_BYTES:
            raise ValueError("it describes no tensors")
        prefix = name.removesuffix("data.pkl")
        order = entries.get(f"{prefix}byteorder")
        if order is not None and archive.read(order) != b"little":
            raise ValueError("its numbers have the other byte order")
        described = _describe(archive.read(name))
        found = {} if not isinstance(described, dict) else described
        tensors = {key: value for key, value in found.items() if isinstance(value, _Tensor)}
        infos = {key: _locate(file, stream, size, entries, prefix, key, value) for key, value in tensors.items()}
    except _DAMAGED as error:
        raise LoadError(
            f"{file}: damaged, or not as torch.save writes it since version 1.6 ({error}): download it again, or "
            f"{_SAVE}"
        ) from None
    if not infos:
        keys = ", ".join(show(key) for key in list(found)[:3])
        raise LoadError(f"{file}: no tensors{f', but {keys}' if keys else ''}; {_SAVE}")
    return infos


def _locate(
    file: Path,
    stream: BinaryIO,
    size: int,
    entries: dict[str, zipfile.ZipInfo],
    prefix: str,
    name: str,
    tensor: _Tensor,
) -> TensorInfo:
    """Find where a tensor's numbers are. Raises ValueError, LoadError or KeyError."""
    dtype, item_bytes, key = tensor.storage
    entry = entries[f"{prefix}data/{key}"]
    stream.seek(entry.header_offset)
    header = stream.read(_LOCAL_HEADER_BYTES)
    if not header.startswith(_LOCAL_HEADER) or len(header) < _LOCAL_HEADER_BYTES:
        raise ValueError(f"no data of tensor {show(name)}")
    if entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"the data of tensor {show(name)} is compressed")
    name_bytes, extra_bytes = (int.from_bytes(header[place : place + 2], "little") for place in (26, 28))
    start = entry.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    begin, num_bytes = tensor.offset * item_bytes, math.prod(tensor.shape) * item_bytes
    if begin + num_bytes > entry.file_size or start + entry.file_size > size:
        raise ValueError(f"the data of tensor {show(name)} is cut off")
    step = 1
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if length > 1 and stride != step:
            raise LoadError(f"{file}: tensor {show(name)}: its numbers are not stored row by row; {_SAVE}")
        step *= length
    return TensorInfo(
        file=file,
        name=name,
        shape=tensor.shape,
        dtype=dtype,
        num_bytes=num_bytes,
        stored=StoredTensor(start + begin, tensor.shape, dtype),
    )


def _describe(data: bytes) -> Any:
    """Return what a pickle describes, without running it. Raises ValueError, TypeError, IndexError or KeyError."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def behind_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        operation = opcode.name
        if operation in ("PROTO", "FRAME"):
            continue
        if operation == "STOP":
            return stack.pop()
        if operation == "MARK":
            marks.append(len(stack))
        elif operation in _CONSTANTS:
            stack.append(_CONSTANTS[operation])
        elif operation in _LITERALS:
            stack.append(argument)
        elif operation == "EMPTY_DICT":
            stack.append({})
        elif operation == "EMPTY_LIST":
            stack.append([])
        elif operation == "GLOBAL":
            stack.append(_Name(argument))
        elif operation == "STACK_GLOBAL":
            name, module = stack.pop(), stack.pop()
            stack.append(_Name(f"{module} {name}"))
        elif operation in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif operation == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif operation in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif operation == "TUPLE":
            stack.append(tuple(behind_mark()))
        elif operation in _TUPLES:
            count = _TUPLES[operation]
            stack[-count:] = [tuple(stack[-count:])]
        elif operation == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif operation == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_made(function, arguments))
        elif operation in ("SETITEM", "SETITEMS"):
            items = behind_mark() if operation == "SETITEMS" else [stack.pop(-2), stack.pop()]
            for key, value in zip(items[::2], items[1::2], strict=True):
                if isinstance(key, str):  # others name no tensors
                    stack[-1][key] = value
        elif operation == "APPENDS":
            behind_mark()  # what lists hold has no names
        elif operation in ("APPEND", "BUILD"):
            stack.pop()  # attributes, such as the versions of modules
        else:
            raise ValueError(f"its description has an operation {operation}")
    raise ValueError("its description has no end")


def _storage(identifier: Any) -> _Storage:
    """Return the storage that a pickle names. Raises ValueError or TypeError."""
    kind, storage_type, key, *_ = identifier
    if kind != "storage" or not isinstance(storage_type, _Name) or not isinstance(key, str):
        raise ValueError("its description names a storage of another kind")
    if storage_type.name not in _STORAGES:
        raise ValueError(f"its description names {_spelled(storage_type)}")
    return _Storage(*_STORAGES[storage_type.name], key)


def _made(function: Any, arguments: Any) -> Any:
    """Return what a pickle makes of a function's arguments. Raises ValueError or TypeError."""
    if not isinstance(function, _Name) or not isinstance(arguments, tuple):
        raise ValueError("its description calls what is no function")
    if function.name == "collections OrderedDict" and not arguments:
        return {}
    if function.name == "torch._utils _rebuild_parameter":
        return arguments[0]
    if function.name != "torch._utils _rebuild_tensor_v2":
        raise ValueError(f"its description names {_spelled(function)}, which is not called")
    storage, offset, shape, strides, *_ = arguments
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, _Storage) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("its description has a tensor that is none")
    return _Tensor(storage, offset, tuple(shape), tuple(strides))


def _spelled(name: _Name) -> str:
    return show(name.name.replace(" ", "."))
