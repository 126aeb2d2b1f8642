"""Formats of a job's files by suffix, checks that a file is what its name says, and the data files of a folder.

Raises ConfigError only, before anything expensive starts.
"""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from nvcli.errors import ConfigError, first_line
from nvcli.job.compression import compression_of
from nvcli.job.own_files import is_table

InputFormat = Literal["jsonl", "json", "csv", "text", "parquet", "arrow", "pdf"]
"""json: one array, or a row on each line. csv: TSV as well. text: a prompt on each line. pdf: a row for each page."""

_INPUT_FORMATS: dict[str, InputFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".pdf": "pdf",
}
"""The formats of inputs by suffix; a file with another one is JSONL."""
_ROW_SUFFIXES = ("", ".jsonl", ".ndjson", ".json")
"""The suffixes of outputs that are JSONL, before that of a compression."""
_KINDS = {
    "gz": "gzip data",
    "zst": "zstd data",
    "bz2": "bzip2 data",
    "xz": "xz data",
    "parquet": "a Parquet table",
    "arrow": "an Arrow table",
    "pdf": "a PDF file",
}
_UNREAD = {
    b"PK\x03\x04": "a spreadsheet or another ZIP archive, which is not read; save it as CSV, or unpack it",
    b"FEA1": "a Feather file of version 1, which is not read; write it again with pyarrow.feather.write_feather",
}
"""Descriptions of files by their first bytes, and what to do with them."""
_TABLE_KINDS = {"parquet": "Parquet", "arrow": "Arrow"}
"""Formats that pyarrow reads."""
_PACKED_KINDS = {**_TABLE_KINDS, "pdf": "PDF"}
"""Formats that have their own compression."""
_STATE_FILE, _SPLITS_FILE = "state.json", "dataset_dict.json"
"""Files in which `datasets` describes a folder that it saved."""
_SIDE_FORMATS = ("json", "text", "pdf")
"""Formats in which folders of data also hold descriptions, licences and what rows name; they count where there is
nothing else."""


def plain_name(name: str) -> str:
    """Return a file's name without the suffix of its compression."""
    compression = compression_of(name)
    return name[: -len(f".{compression}")] if compression else name


def input_format(name: str) -> InputFormat:
    """Return the format of an input by its name, whatever its compression."""
    return data_format(name) or "jsonl"


def data_format(name: str) -> InputFormat | None:
    """Return the format of a file among others in a folder; None if its name does not tell."""
    return _INPUT_FORMATS.get(Path(plain_name(name)).suffix.lower())


def pyarrow_format(name: str) -> str | None:
    """Return the name of a format that pyarrow reads, such as `Parquet`; None for other inputs."""
    return _TABLE_KINDS.get(input_format(name))


def check_pyarrow(what: str) -> None:
    """Raise ConfigError where pyarrow is missing, or cannot be imported, as with a NumPy that it was not made for.
    `what` needs it, such as "the input a.parquet is Parquet"."""
    if find_spec("pyarrow") is None:
        raise ConfigError(f"{what}, which needs pyarrow; install it with: pip install pyarrow")
    try:
        importlib.import_module("pyarrow")
    except Exception as error:
        raise ConfigError(
            f"{what}, which needs pyarrow, and the installed one cannot be imported ({first_line(error)}); try: "
            "pip install -U pyarrow numpy"
        ) from None


def is_pdf(name: str) -> bool:
    """Tell whether an input is a PDF file by its name."""
    return input_format(name) == "pdf"


def check_output_format(path: Path) -> None:
    """Raise ConfigError where the name of an output asks for a format that is not written."""
    name = plain_name(path.name)
    suffix = Path(name).suffix
    if suffix.lower() in _ROW_SUFFIXES or is_table(path):
        return
    raise ConfigError(
        f"the output {path} cannot be written: answers are written as .jsonl, .csv or .tsv (also with .gz, .zst, "
        f".bz2 or .xz after it) or .parquet, and not as {suffix}{path.name.removeprefix(name)}; name it, for example, "
        f"-o {shlex.quote(str(path.with_name(Path(name).stem)))}.jsonl"
    )


def check_input_format(path: Path) -> None:
    """Raise ConfigError where a regular file is of another kind than its name says."""
    try:
        with path.open("rb") as file:
            start = file.read(6)
    except OSError:
        return  # the reader says so, and how far it came
    if unread := _unread(start):
        raise ConfigError(f"the input {path} holds {unread}")
    table = input_format(path.name)
    compression = compression_of(path.name)
    if table in _PACKED_KINDS and compression:
        raise ConfigError(
            f"the input {path} is a compressed {_PACKED_KINDS[table]} file, which is not read; unpack it, as such "
            "files have a compression of their own"
        )
    said = table if table in _PACKED_KINDS else compression
    found = _kind_of(start)
    if not start or found == said or (said == "pdf" and not found):  # a PDF file may begin with anything
        return
    plain = path.with_suffix("") if said and path.suffix.lower() == f".{said}" else path
    if found:
        trouble = f"holds {_KINDS[found]}, and its name does not say so; rename it"
        plain = plain.with_name(f"{plain.name}.{found}")
    else:
        trouble = f"is not {_KINDS[said]}, as its name says: it begins with {start[:4]!r}. If it is JSONL, rename it"
        plain = plain if plain.suffix else plain.with_name(f"{plain.name}.jsonl")
    command = "" if plain.exists() else f": mv {shlex.quote(str(path))} {shlex.quote(str(plain))}"
    raise ConfigError(f"the input {path} {trouble}{command}")


def check_stream_format(start: bytes) -> None:
    """Raise ConfigError if standard input begins with the first bytes of another format than JSONL."""
    if unread := _unread(start):
        raise ConfigError(f"standard input holds {unread}")
    if found := _kind_of(start[:6]):
        command = {"gz": "zcat", "zst": "zstdcat", "bz2": "bzcat", "xz": "xzcat"}.get(found)
        unpack = f", or unpack it ({command} FILE | …)" if command else ""
        raise ConfigError(f"standard input holds {_KINDS[found]}, and is read as JSONL; name the file instead{unpack}")


def _unread(start: bytes) -> str | None:
    return next((text for magic, text in _UNREAD.items() if start.startswith(magic)), None)


def _kind_of(start: bytes) -> str:
    """Return the kind of a file by its first bytes: a key of `_KINDS`, or `` for anything else."""
    if start.startswith(b"\x1f\x8b"):
        return "gz"
    if start[:4] == b"\x28\xb5\x2f\xfd" or (start[1:4] == b"\x2a\x4d\x18" and start[0] >> 4 == 5):  # skippable frames
        return "zst"
    if start.startswith(b"BZh") and start[4:] in (b"1A", b"\x17r"):  # a block; the end
        return "bz2"
    if start == b"\xfd7zXZ\0":
        return "xz"
    if start == b"ARROW1" or start[:4] == b"\xff\xff\xff\xff":  # a file; a stream
        return "arrow"
    return "parquet" if start[:4] == b"PAR1" else "pdf" if start[:5] == b"%PDF-" else ""


def folder_files(folder: Path, leave_out: Callable[[list[str]], list[str]]) -> list[str]:
    """Return the data files of a folder in the order of its rows; none where there are none.

    The folder is a dataset that `datasets` saved to disk, or holds files of one format. `leave_out` is given all files
    of data in it, and returns those that may be inputs.

    Raises ConfigError where it holds several splits or files of several formats, so that one has to be named.
    """
    if (splits := _read_json(folder / _SPLITS_FILE)) is not None:
        names = [str(folder / name) for name in _names(splits, "splits")]
        raise ConfigError(f"the input {folder} is a dataset of several splits; name one of them: {', '.join(names)}")
    if (state := _read_json(folder / _STATE_FILE)) is not None and state.get("_data_files"):
        if state.get("_indices_data_files"):
            raise ConfigError(
                f"the input {folder} is a dataset with a selection of its rows; make them rows of their own: "
                "dataset.flatten_indices().save_to_disk(…)"
            )
        return leave_out([str(folder / name) for name in _names(state, "_data_files")])
    found = [file for file in sorted(folder.iterdir()) if file.is_file() and not file.name.startswith((".", "_"))]
    by_format: dict[str, list[str]] = {}
    for name in leave_out([str(file) for file in found if data_format(file.name) is not None]):
        by_format.setdefault(input_format(name), []).append(name)
    formats = [format for format in by_format if format not in _SIDE_FORMATS] or list(by_format)
    if len(formats) > 1:
        first = [Path(by_format[format][0]).name for format in formats]
        raise ConfigError(
            f"the input {folder} is a folder with files of several formats ({', '.join(first)}); name files of one, "
            f"such as '{folder / f'*{Path(first[0]).suffix}'}'"
        )
    return by_format[formats[0]] if formats else []


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file of `datasets`; None where there is no such file. Raises ConfigError."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}


def _names(values: dict[str, Any], key: str) -> list[str]:
    """Return the names of files or folders under a key, which are texts or objects with a `filename`."""
    found = values.get(key)
    names = (
        [each.get("filename") if isinstance(each, dict) else each for each in found] if isinstance(found, list) else []
    )
    return [name for name in names if isinstance(name, str)]
