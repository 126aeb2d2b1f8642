"""The formats of a job's files, by the end of their names, and whether a file is what its name says.

Raises ConfigError only, before anything expensive starts.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

from nvcli.errors import ConfigError
from nvcli.jobs.compression import compression_of
from nvcli.jobs.own_files import is_table

InputFormat = Literal["jsonl", "json", "csv", "text", "parquet", "arrow"]
"""json: one array, or a row on each line. csv: TSV as well. text: a prompt on each line."""

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
}
"""The formats of inputs by suffix; a file with another one is JSONL."""
_ROW_SUFFIXES = ("", ".jsonl", ".ndjson", ".json")
"""The suffixes of outputs that are JSONL, before that of a compression."""
_KINDS = {"gz": "gzip data", "zst": "zstd data", "parquet": "a Parquet table", "arrow": "an Arrow table"}
_UNREAD = {
    b"PK\x03\x04": "a spreadsheet or another ZIP archive, which is not read; save it as CSV, or unpack it",
    b"\xfd7zXZ\0": "xz data, which is not read; unpack it, or pack it with gzip or zstd",
    b"BZh91A": "bzip2 data, which is not read; unpack it, or pack it with gzip or zstd",
    b"FEA1": "a Feather file of version 1, which is not read; write it with pyarrow.feather.write_feather anew",
}
"""What files that begin so hold, and what to do with them."""
_TABLE_KINDS = {"parquet": "Parquet", "arrow": "Arrow"}
"""Formats that pyarrow reads; they have a compression of their own."""


def plain_name(name: str) -> str:
    """Return a file's name without the suffix of its compression."""
    compression = compression_of(name)
    return name.removesuffix(f".{compression}") if compression else name


def input_format(name: str) -> InputFormat:
    """Return the format of an input by its name, whatever its compression."""
    return data_format(name) or "jsonl"


def data_format(name: str) -> InputFormat | None:
    """Return the format of a file that may lie among others in a folder; None where its name says none."""
    return _INPUT_FORMATS.get(Path(plain_name(name)).suffix.lower())


def pyarrow_format(name: str) -> str | None:
    """Return what an input is called that pyarrow reads, such as `Parquet`; None: it does not read it."""
    return _TABLE_KINDS.get(input_format(name))


def check_output_format(path: Path) -> None:
    """Raise ConfigError where the name of an output asks for a format that is not written."""
    name = plain_name(path.name)
    suffix = Path(name).suffix
    if suffix in _ROW_SUFFIXES or is_table(path):
        return
    raise ConfigError(
        f"the output {path} cannot be written: answers are written as .jsonl, .csv or .tsv (also with .gz or .zst "
        f"behind it) or .parquet, and not as {suffix}{path.name.removeprefix(name)}; name it, for example, "
        f"-o {shlex.quote(str(path.with_name(Path(name).stem)))}.jsonl"
    )


def check_input_format(path: Path) -> None:
    """Raise ConfigError where a regular file is of another kind than its name says."""
    try:
        with path.open("rb") as file:
            start = file.read(6)
    except OSError:
        return  # the reader says so, and how far it came
    if unread := next((text for magic, text in _UNREAD.items() if start.startswith(magic)), None):
        raise ConfigError(f"the input {path} holds {unread}")
    table = input_format(path.name)
    compression = compression_of(path.name)
    if table in _TABLE_KINDS and compression:
        raise ConfigError(
            f"the input {path} is a compressed {_TABLE_KINDS[table]} file, which is not read; unpack it, as such "
            "tables have a compression of their own"
        )
    said = table if table in _TABLE_KINDS else compression
    found = _kind_of(start)
    if not start or found == said:
        return
    plain = path.with_name(path.name.removesuffix(f".{said}")) if said else path
    if found:
        trouble = f"holds {_KINDS[found]}, and its name does not say so; rename it"
        plain = plain.with_name(f"{plain.name}.{found}")
    else:
        trouble = f"is not {_KINDS[said]}, as its name says: it begins with {start[:4]!r}. If it is JSONL, rename it"
        plain = plain if plain.suffix else plain.with_name(f"{plain.name}.jsonl")
    command = "" if plain.exists() else f": mv {shlex.quote(str(path))} {shlex.quote(str(plain))}"
    raise ConfigError(f"the input {path} {trouble}{command}")


def _kind_of(start: bytes) -> str:
    """Return what a file that begins with these bytes is: a key of `_KINDS`, or `` for anything else."""
    if start.startswith(b"\x1f\x8b"):
        return "gz"
    if start[:4] == b"\x28\xb5\x2f\xfd" or (start[1:4] == b"\x2a\x4d\x18" and start[0] >> 4 == 5):  # skippable frames
        return "zst"
    if start == b"ARROW1" or start[:4] == b"\xff\xff\xff\xff":  # a file; a stream
        return "arrow"
    return "parquet" if start[:4] == b"PAR1" else ""
