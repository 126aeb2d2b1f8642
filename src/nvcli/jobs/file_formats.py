"""The formats of a job's files, by the end of their names, and whether a file is what its name says.

Raises ConfigError only, before anything expensive starts.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from nvcli.errors import ConfigError
from nvcli.jobs.compression import compression_of
from nvcli.jobs.own_files import is_parquet

_ROW_SUFFIXES = ("", ".jsonl", ".ndjson", ".json")
"""The suffixes of outputs that are JSONL, before that of a compression."""
_KINDS = {"gz": "gzip data", "zst": "zstd data", "parquet": "a Parquet table"}


def check_output_format(path: Path) -> None:
    """Raise ConfigError where the name of an output asks for a format that is not written."""
    compression = compression_of(path.name)
    name = path.name.removesuffix(f".{compression}")
    suffix = Path(name).suffix
    if suffix in _ROW_SUFFIXES or (is_parquet(name) and not compression):
        return
    ending = f"{suffix}.{compression}" if compression else suffix
    raise ConfigError(
        f"the output {path} cannot be written: answers are written as .jsonl, .jsonl.gz, .jsonl.zst or .parquet, and "
        f"not as {ending}; name it, for example, -o {shlex.quote(str(path.with_name(Path(name).stem)))}.jsonl"
    )


def check_input_format(path: Path) -> None:
    """Raise ConfigError where a regular file is compressed in another way than its name says, or not at all."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError:
        return  # the reader says so, and how far it came
    said = "parquet" if is_parquet(path) else compression_of(path.name)
    found = _kind_of(start)
    if not start or found == said:
        return
    plain = path.with_name(path.name.removesuffix(f".{said}")) if said else path
    if found:
        trouble = f"holds {_KINDS[found]}, and its name does not say so; rename it"
        plain = plain.with_name(f"{plain.name}.{found}")
    else:
        trouble = f"is not {_KINDS[said]}, as its name says: it begins with {start!r}. If it is JSONL, rename it"
        plain = plain if plain.suffix else plain.with_name(f"{plain.name}.jsonl")
    command = "" if plain.exists() else f": mv {shlex.quote(str(path))} {shlex.quote(str(plain))}"
    raise ConfigError(f"the input {path} {trouble}{command}")


def _kind_of(start: bytes) -> str:
    """Return what a file that begins with these four bytes is: a key of `_KINDS`, or `` for anything else."""
    if start.startswith(b"\x1f\x8b"):
        return "gz"
    if start == b"\x28\xb5\x2f\xfd" or (start[1:] == b"\x2a\x4d\x18" and start[0] >> 4 == 5):  # skippable frames too
        return "zst"
    return "parquet" if start == b"PAR1" else ""
