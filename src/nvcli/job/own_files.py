"""The files that a job writes, replaces and removes: their names, in one place.

All of them follow from the name of the output. None of them may be an input of the job. This module only makes names;
it does not look whether there are such files, except to follow a symbolic link.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

MANIFEST_SUFFIX = ".manifest.json"
"""Suffix of the file beside an output that says which job made it."""
WORKING_SUFFIX = ".rows.jsonl"
"""Suffix of the file that holds the rows of a table until the table is complete."""
DIGESTS_SUFFIX = ".digests"
"""Suffix of the file beside an output that holds a digest of each input row."""
TRACEBACK_SUFFIX = ".traceback.txt"
"""Suffix of the file beside an output that keeps the tracebacks of failed runs."""
_SHARD_OUTPUT = re.compile(r"\.shard-\d+-of-\d+(\.out\.[a-z0-9.]+)$")
"""End of the name of a shard's output."""


_CSV_SUFFIXES = tuple(f"{kind}{packed}" for kind in (".csv", ".tsv") for packed in ("", ".gz", ".zst", ".bz2", ".xz"))


def is_parquet(path: Path | str) -> bool:
    return str(path).lower().endswith(".parquet")


def is_csv(path: Path | str) -> bool:
    """Tell whether a file is CSV or TSV by its name, compressed or not."""
    return str(path).lower().endswith(_CSV_SUFFIXES)


def is_table(path: Path | str) -> bool:
    """Tell whether an output is a table, which is made from all of its rows together."""
    return is_parquet(path) or is_csv(path)


def is_sidecar(name: str) -> bool:
    """Tell whether a name is that of a file that jobs keep beside their outputs."""
    return name.endswith((MANIFEST_SUFFIX, DIGESTS_SUFFIX, WORKING_SUFFIX, TRACEBACK_SUFFIX))


def is_shard_output(name: str) -> bool:
    """Tell whether a name is the default name of a shard's output."""
    return _SHARD_OUTPUT.search(name) is not None


def whole_name(name: str) -> str | None:
    """Return the name of the whole job's output by that of a shard; None if the name does not tell the shard."""
    found = _SHARD_OUTPUT.search(name)
    return None if found is None else name[: found.start()] + found[1]


def real_path(path: Path) -> Path:
    """Return the target of a symbolic link, and any other path unchanged."""
    return Path(os.path.realpath(path)) if os.path.islink(path) else path


def rows_path(output: Path) -> Path:
    """Return the file that rows are appended to: the output itself, or the working file beside a table."""
    return output.with_name(output.name + WORKING_SUFFIX) if is_table(output) else output


def _real_rows_path(output: Path) -> Path:
    """Return the file that rows are appended to, behind a link where that is the output itself."""
    return rows_path(output) if is_table(output) else real_path(output)


def manifest_path(output: Path) -> Path:
    return output.with_name(output.name + MANIFEST_SUFFIX)


def manifest_draft_path(output: Path) -> Path:
    """Return where a new version of the manifest is written."""
    path = manifest_path(output)
    return path.with_name(f".{path.name}.tmp")


def digests_path(output: Path) -> Path:
    return output.with_name(output.name + DIGESTS_SUFFIX)


def traceback_path(output: Path) -> Path:
    return output.with_name(output.name + TRACEBACK_SUFFIX)


def rewrite_path(path: Path) -> Path:
    """Return where a new version of a file is written. Leftovers of a crash there are useless."""
    return path.with_name(f".{path.name}.new")


def lock_path(output: Path) -> Path:
    """Return the file that says which run writes to the output, beside the output itself."""
    path = real_path(output)
    return path.with_name(f".{path.name}.lock")


def temporary_files(output: Path) -> list[Path]:
    """Return the files that only an interrupted run leaves behind. The holder of the output may remove them."""
    rewritten = {real_path(output), _real_rows_path(output)}
    return [*map(rewrite_path, [*sorted(rewritten), digests_path(output)]), manifest_draft_path(output)]


def own_files(output: Path) -> list[Path]:
    """Return every file that a job with this output writes, replaces or removes; the output comes first."""
    rows = rows_path(output)
    working = [rows] if rows != output else []
    beside = [manifest_path(output), digests_path(output), *working, traceback_path(output), lock_path(output)]
    return [output, *beside, *temporary_files(output)]
