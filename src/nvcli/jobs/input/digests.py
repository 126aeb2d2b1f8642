"""Digests that tell files apart in an instant, whatever their size."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from nvcli.errors import ConfigError
from nvcli.jobs.files import STREAM
from nvcli.regular_file import open_regular

WHOLE_BYTES = 8 * 1024 * 1024
"""Files up to this size are read from end to end."""
NUM_SAMPLES = 64
SAMPLE_BYTES = 64 * 1024
"""Larger files are read in `NUM_SAMPLES` places of so many bytes, evenly spread from the first to the last."""


def digest_file(path: Path) -> str:
    """Return a digest of a file's size and bytes.

    In a large file, a change that keeps the size and misses all places that are read is not seen. Raises OSError where
    the file cannot be read or is no regular one.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        if size <= WHOLE_BYTES:
            while chunk := file.read(1024 * 1024):
                digest.update(chunk)
        else:
            for number in range(NUM_SAMPLES):
                file.seek((size - SAMPLE_BYTES) * number // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def is_repeatable(inputs: Sequence[str]) -> bool:
    """Tell whether the same inputs can be read again: files can, standard input and pipes cannot."""
    return all(name != STREAM and stat.S_ISREG(os.stat(name).st_mode) for name in inputs)


def describe_inputs(inputs: Sequence[str]) -> list[str]:
    """Return each input's size and digest as a manifest holds them. Raises ConfigError."""
    descriptions = []
    for name in inputs:
        try:
            descriptions.append(f"{os.stat(name).st_size:,} bytes, sha256 {digest_file(Path(name))}")
        except OSError as error:
            raise ConfigError(f"the input {name} cannot be read: {error.strerror}") from None
    return descriptions
