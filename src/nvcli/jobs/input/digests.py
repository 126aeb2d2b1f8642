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
"""Larger inputs are read in `NUM_SAMPLES` places of so many bytes."""


def digest_file(path: Path, *, num_samples: int = NUM_SAMPLES, sample_bytes: int = SAMPLE_BYTES) -> str:
    """Return a digest of a file's size and bytes. Raises OSError.

    A file of more than `WHOLE_BYTES` is read at `num_samples` places of `sample_bytes`, evenly spread from its first to
    its last byte. A change there that keeps the size and misses all of these places is not seen. OSErrors include those
    of a path that is no regular file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        if size <= WHOLE_BYTES:
            while chunk := file.read(1024 * 1024):
                digest.update(chunk)
        else:
            places = [(size - sample_bytes) * number // (num_samples - 1) for number in range(num_samples)]
            for place in places:  # all are fetched at once, which a disk does faster than one after the other
                os.posix_fadvise(file.fileno(), place, sample_bytes, os.POSIX_FADV_WILLNEED)
            for place in places:
                digest.update(os.pread(file.fileno(), sample_bytes, place))
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
