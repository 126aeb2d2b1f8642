"""Compressed files, known by their suffix: bytes of `.gz` and `.zst` files to plain bytes and back.

Each write becomes a complete member (gzip) or frame (zstd) that can be read by itself. So a file can be continued, and
a torn end costs the last member only. Python's file wrappers do not tell where a member ends; this module does.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

READ_BYTES = {"": 256 * 1024, "gz": 64 * 1024, "zst": 32 * 1024}
"""Bytes of a file that are read at a time, few enough that what they unpack to stays small too."""


class CompressionError(Exception):
    """The bytes of a file are not what its suffix says, or end too early."""


class _Member(Protocol):
    """The part that zlib's and zstandard's decompression objects share: each unpacks one member."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def compression_of(name: str) -> str:
    """Return the compression of a file: `gz`, `zst`, or `` for none."""
    return next((suffix for suffix in ("gz", "zst") if name.endswith(f".{suffix}")), "")


class Unpacker:
    """Unpacks a stream of members, and tells where in the stream the members end."""

    def __init__(self, compression: str) -> None:
        self._new_member = _new_member(compression)
        self._padding = b"\0" if compression == "gz" else b""
        self._member: _Member | None = None
        self.num_bytes = 0
        """Compressed bytes taken so far."""
        self.member_end = 0
        """Where the last complete member ends, in compressed bytes from the start."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the plain bytes that `data` adds, in pieces. Raises CompressionError.

        No piece spans two members; the last piece of a member may be empty.
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
        """Take note that the stream has ended. Raises CompressionError if it ends inside a member."""
        if self._member is not None:
            raise CompressionError("the compressed data ends too early")


def make_packer(compression: str) -> Callable[[bytes], bytes]:
    """Return the function that makes one complete member of plain bytes."""
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
