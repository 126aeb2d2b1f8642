"""Which files a job reads and writes, checked before anything expensive starts. Raises ConfigError only."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from nvcli.errors import ConfigError

STREAM = "-"
"""Standard input or output."""


def check_inputs(inputs: Sequence[str]) -> None:
    """Each input is there and readable, and is given once."""
    for name in inputs:
        if name == STREAM:
            continue
        path = Path(name)
        if path.is_dir():
            raise ConfigError(f"the input {name} is a folder; name the files in it, such as {path / '*.jsonl'}")
        if not path.exists():
            raise ConfigError(f"there is no input file {name}")
        if path.suffix == ".zst":
            raise ConfigError(f"the input {name} is compressed with zstd, which is not read yet; unpack it or use .gz")
        if not os.access(path, os.R_OK):
            raise ConfigError(f"the input {name} cannot be read: no permission")
    seen: set[str] = set()
    for name in inputs:
        key = name if name == STREAM else str(Path(name).resolve())
        if key in seen:
            raise ConfigError(f"the input {name} is given twice")
        seen.add(key)


def choose_output(inputs: Sequence[str], output: str | None) -> str:
    """The output that was named, or `input.out.jsonl` beside a single input file."""
    if output is not None:
        return output
    if len(inputs) != 1 or inputs[0] == STREAM:
        which = "standard input" if len(inputs) == 1 else "several inputs"
        raise ConfigError(f"name the output with -o FILE, or -o - for standard output: it cannot follow from {which}")
    path = Path(inputs[0])
    name = path.name.removesuffix(".gz")
    stem = name.removesuffix(".jsonl").removesuffix(".json") or name
    return str(path.with_name(f"{stem}.out.jsonl"))


def check_output(inputs: Sequence[str], output: str, *, overwrite: bool) -> None:
    """The output can be written, is none of the inputs, and is new unless it may be overwritten."""
    if output == STREAM:
        return
    path = Path(output)
    if path.is_dir():
        raise ConfigError(f"the output {output} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder of the output {output} does not exist; make it with: mkdir -p {path.parent}")
    if path.suffix in (".gz", ".zst"):
        raise ConfigError(f"the output {output} would be compressed, which is not written yet; name a .jsonl file")
    for name in inputs:
        if name != STREAM and path.exists() and path.samefile(name):
            raise ConfigError(f"the output {output} is also an input; name another with -o")
    if path.exists():
        if stat.S_ISREG(path.stat().st_mode) and not overwrite:
            raise ConfigError(f"the output {output} exists; start it anew with --overwrite, or name another with -o")
        if not os.access(path, os.W_OK):
            raise ConfigError(f"the output {output} cannot be written: no permission")
    elif not os.access(path.parent, os.W_OK):
        raise ConfigError(f"the output {output} cannot be made: no permission to write in {path.parent}")
