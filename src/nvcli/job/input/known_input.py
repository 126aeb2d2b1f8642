"""The inputs as they were when a job began, known by digests of their bytes, and checks for changes.

Rows that are read are rows of the input as it was: every chunk is checked before its rows are given out. So a job whose
input is changed while it runs has no wrong answers, and goes on once the input is back in its place.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nvcli.core.system.regular_file import open_regular
from nvcli.errors import ConfigError, InputChanged
from nvcli.job.file_state import FileState
from nvcli.job.files import STREAM

WHOLE_BYTES = 8 * 1024 * 1024
"""Files up to this size are read completely."""
NUM_SAMPLES = 64
SAMPLE_BYTES = 64 * 1024
"""Larger files are read at `NUM_SAMPLES` places, this many bytes at each."""


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
    """Tell whether all inputs can be read again, as files can, and standard input and pipes cannot."""
    return all(name != STREAM and stat.S_ISREG(os.stat(name).st_mode) for name in inputs)


def describe_input(name: str) -> str:
    """Return an input's size and digest as a manifest holds them. Raises OSError."""
    return f"{os.stat(name).st_size:,} bytes, sha256 {digest_file(Path(name))}"


@dataclass(frozen=True, slots=True)
class KnownInput:
    """A regular file of the input, as it was when the job began."""

    name: str
    state: FileState
    description: str
    """Its size and digest, as the manifest holds them."""

    @property
    def is_sampled(self) -> bool:
        """Whether the digest misses edits that keep the size."""
        return self.state.num_bytes > WHOLE_BYTES

    def changed(self, what: str) -> InputChanged:
        """Return the error of a run whose input has changed in this way."""
        return InputChanged(
            f"the input {self.name} was changed during the run: {what}. The rows answered so far are those of the "
            "input as it was: put it back, and the same command continues; or use the new contents with --update"
        )

    def check_state(self) -> None:
        """Raise InputChanged if the file may have other bytes, or another one has taken its place."""
        try:
            is_same = FileState.of(self.name) == self.state
        except OSError:
            is_same = False
        if not is_same:
            raise self.changed("another program wrote to it, removed it, or put another file in its place")

    def is_described_by(self, file: str) -> bool:
        """Tell whether a file has the same size and digest."""
        try:
            return describe_input(file) == self.description
        except OSError:
            return False


def know_inputs(names: Sequence[str]) -> tuple[KnownInput, ...]:
    """Record the state of inputs, which are regular files. Raises ConfigError."""
    known = []
    for name in names:
        try:
            known.append(KnownInput(name, FileState.of(name), describe_input(name)))
        except OSError as error:  # that of a read names no file
            raise ConfigError(f"the input {name} cannot be read: {error.strerror}") from None
    return tuple(known)


def check_unchanged(inputs: Sequence[KnownInput]) -> None:
    """Raise InputChanged if an input has changed. A new modification time alone does not count."""
    for known in inputs:
        try:
            now = FileState.of(known.name)
        except OSError as error:
            raise known.changed(error.strerror or type(error).__name__) from None
        if now != known.state and not known.is_described_by(known.name):
            raise known.changed(f"it had {known.description}, and has {now.num_bytes:,} bytes now, or others")


class ReadCheck:
    """Checks the chunks of an open input as they are read."""

    def __init__(self, known: KnownInput, fd: int) -> None:
        self._known = known
        self._state = known.state
        self._fd = fd
        self._num_read = 0

    def take(self, chunk: bytes) -> None:
        """Check the next chunk; an empty one is the end. Raises InputChanged if it may differ from what was there."""
        known, now = self._known, FileState.of(self._fd)
        if now != self._state:
            # Somebody wrote to it or touched it, or another file has taken its name before it was opened.
            if now.num_bytes != known.state.num_bytes:
                raise known.changed(f"it had {known.state.num_bytes:,} bytes, and has {now.num_bytes:,} now")
            again = os.pread(self._fd, len(chunk) or 1, self._num_read)
            if again != chunk or not known.is_described_by(f"/dev/fd/{self._fd}"):
                raise known.changed("other bytes are where rows are being read")
            self._state = now
        self._num_read += len(chunk)
