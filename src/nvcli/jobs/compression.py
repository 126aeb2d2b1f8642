"""Compressed files, by suffix: `.gz` and `.zst` bytes to plain ones and back.

What is written is a row of complete members (gzip) or frames (zstd), each readable by itself, so that a file can be
continued and a torn end costs the last one only. Python's file wrappers do not tell where a member ends; this does.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

READ_BYTES = {"": 256 * 1024, "gz": 64 * 1024, "zst": 32 * 1024}
"""How much of a file is taken at a time, so that what it unpacks to stays small too."""


class CompressionError(Exception):
    """The bytes are not what the suffix says, or end too early."""


class _Member(Protocol):
    """What zlib's and zstandard's decompression objects have in common: one member, to its end."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def compression_of(name: str) -> str:
    """`gz`, `zst`, or `` for a file that is not compressed."""
    return next((suffix for suffix in ("gz", "zst") if name.endswith(f".{suffix}")), "")


class Unpacker:
    """Plain bytes of a stream of members, and where in the stream they end."""

    def __init__(self, compression: str) -> None:
        self._new_member = _new_member(compression)
        self._padding = b"\0" if compression == "gz" else b""
        self._member: _Member | None = None
        self.num_bytes = 0
        """Compressed bytes taken."""
        self.member_end = 0
        """Where the last complete member ends, in compressed bytes from the start."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The plain bytes that `data` adds, in pieces. None spans two members; the last one of a member may be empty.

        Raises CompressionError.
        """
        self.num_bytes += len(data)
        while data:
            if self._member is None:
                if self._padding and not (data := data.lstrip(self._padding)):
                    break  # which gzip allows behind a member
                self._member = self._new_member()
            try:
                plain = self._member.decompress(data)
            except Exception as error:  # zlib.error, zstandard.ZstdError: no common base
                raise CompressionError(str(error)) from None
            data = b""
            is_end = self._member.eof
            if is_end:
                data = self._member.unused_data
                self.member_end = self.num_bytes - len(data)
                self._member = None
            if plain or is_end:
                yield plain

    def end(self) -> None:
        """The stream has ended. Raises CompressionError if it ends inside a member."""
        if self._member is not None:
            raise CompressionError("the compressed data ends too early")


def make_packer(compression: str) -> Callable[[bytes], bytes]:
    """Plain bytes → one complete member."""
    if compression == "gz":
        import gzip

        return lambda data: gzip.compress(data, compresslevel=6, mtime=0)
    if compression == "zst":
        import zstandard

        return zstandard.ZstdCompressor(level=3, write_checksum=True).compress
    return bytes


def _new_member(compression: str) -> Callable[[], Any]:
    if compression == "gz":
        return lambda: zlib.decompressobj(wbits=31)
    if compression == "zst":
        import zstandard

        return zstandard.ZstdDecompressor().decompressobj
    raise AssertionError(compression)
