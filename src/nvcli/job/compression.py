"""Gzip, zstd, bzip2 and xz files, known by their suffix: packed bytes to plain bytes and back.

Each write becomes a complete member (in zstd a frame, in bzip2 and xz a stream) that can be read by itself. So a file
can be continued, and a torn end costs the last member only. Python's file wrappers do not tell where a member ends;
this module does. Plain bytes come in pieces of at most `PIECE_BYTES`, whatever the file unpacks to.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

READ_BYTES = {"": 256 * 1024, "gz": 64 * 1024, "zst": 32 * 1024, "bz2": 64 * 1024, "xz": 64 * 1024}
"""Bytes to read at a time, few enough that what they unpack to stays small."""
PIECE_BYTES = 1024 * 1024
"""Maximum size of a piece of plain bytes."""
_XZ_MEMORY_BYTES = 256 * 1024 * 1024
"""Maximum memory for unpacking xz; `xz -9` needs 65 MiB."""
_LARGE_XZ = "its dictionary takes more than 256 MiB of memory; pack it again with one of `xz -1` to `xz -9`"

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_BLOCK_BYTES = 128 * 1024
"""Maximum size of an unpacked zstd block (RFC 8878, 3.1.1.2.4)."""
_ZSTD_PREFIX_BYTES = 5
"""The first bytes of a frame, which tell the length of its header."""
_ZSTD_BLOCK_HEADER_BYTES = 3
_RLE_BLOCK = 1
"""Block type: a single byte, repeated."""


class CompressionError(Exception):
    """A file is not compressed as its suffix says, or ends too early."""


def compression_of(name: str) -> str:
    """Return the compression of a file by its name, in capitals or not: `gz`, `zst`, `bz2`, `xz`, or `` for none."""
    return next((suffix for suffix in READ_BYTES if suffix and name.lower().endswith(f".{suffix}")), "")


class Unpacker:
    """Unpacks a stream of members, and tells where in the stream the members end."""

    def __init__(self, compression: str) -> None:
        self._compression = compression
        self._padding = b"\0" if compression in ("gz", "xz") else b""
        self._member: Any = None
        self.num_bytes = 0
        """Compressed bytes taken so far."""
        self.member_end = 0
        """The end of the last complete member, in compressed bytes from the start."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the plain bytes that `data` adds, in pieces. Raises CompressionError.

        No piece spans two members; the last piece of a member may be empty.
        """
        self.num_bytes += len(data)
        may_hold_more = False
        while data or may_hold_more:
            if self._member is None and self._padding and not (data := data.lstrip(self._padding)):
                break  # which gzip and xz allow after a member
            try:
                self._member = self._member or _new_member(self._compression)
                plain = self._member.decompress(data, PIECE_BYTES)
            except Exception as error:  # zlib.error, ZstdError, a Python without bz2: no common base
                raise CompressionError(_LARGE_XZ if "Memory usage limit" in str(error) else str(error)) from None
            data = self._member.unconsumed_tail
            may_hold_more = len(plain) == PIECE_BYTES  # the libraries keep what did not fit
            is_end = self._member.eof
            if is_end:
                data = self._member.unused_data
                self.member_end = self.num_bytes - len(data)
                self._member, may_hold_more = None, False
            if plain or is_end:
                yield plain

    def end(self) -> None:
        """Note the end of the stream. Raises CompressionError if it is inside a member."""
        if self._member is not None:
            raise CompressionError("the compressed data ends too early")


def make_packer(compression: str) -> Callable[[bytes], bytes]:
    """Return a function that packs plain bytes into one complete member."""
    if compression == "gz":
        import gzip

        return lambda data: gzip.compress(data, compresslevel=6, mtime=0)
    if compression == "zst":
        import zstandard

        return zstandard.ZstdCompressor(level=3, write_checksum=True).compress
    if compression == "bz2":
        import bz2

        return bz2.compress
    if compression == "xz":
        import lzma

        return lzma.compress
    return bytes


def _new_member(compression: str) -> Any:
    """Return an object that unpacks one member, as zlib's decompression objects do."""
    if compression == "bz2":
        import bz2

        return _Stream(bz2.BZ2Decompressor())
    if compression == "xz":
        import lzma

        return _Stream(lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES))
    return zlib.decompressobj(wbits=31) if compression == "gz" else _ZstdMember()


class _Stream:
    """One stream of bzip2 or xz, whose decompressors keep what did not fit.

    It has the part of zlib's decompression objects that is used here.
    """

    unconsumed_tail = b""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.decompress: Callable[[bytes, int], bytes] = stream.decompress

    @property
    def eof(self) -> bool:
        return bool(self._stream.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._stream.unused_data)


class _ZstdMember:
    """One frame. zstandard unpacks everything it is given at once, so it is given a few blocks at a time.

    It has the part of zlib's decompression objects that is used here.
    """

    def __init__(self) -> None:
        import zstandard

        self._frame: Any = zstandard.ZstdDecompressor().decompressobj()
        self._blocks = _ZstdBlocks()
        self.eof = False
        self.unused_data = self.unconsumed_tail = b""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        end = self._blocks.end_of(data, max_length // _ZSTD_BLOCK_BYTES)
        plain = bytes(self._frame.decompress(data[:end]))
        self.eof, self.unconsumed_tail = self._frame.eof, data[end:]
        self.unused_data = self._frame.unused_data + data[end:]
        return plain


class _ZstdBlocks:
    """Finds where the blocks of a frame end (RFC 8878, 3.1.1). Checking is left to the decompressor."""

    def __init__(self) -> None:
        self._header = b""
        """The bytes received of the next header: the frame's, then each block's."""
        self._header_bytes = _ZSTD_PREFIX_BYTES
        self._is_in_frame = False
        self._is_last = False
        self._num_left = 0
        """Bytes before the next header."""

    def end_of(self, data: bytes, most_blocks: int) -> int:
        """Consume `data` up to the end of its `most_blocks`-th block, and return how far that is."""
        at = 0
        while at < len(data):
            if self._num_left:
                num_bytes = min(self._num_left, len(data) - at)
                self._num_left -= num_bytes
                at += num_bytes
                if not self._num_left and not (most_blocks := most_blocks - 1):
                    break
            elif self._is_last:
                return len(data)  # no block follows
            else:
                part = data[at : at + self._header_bytes - len(self._header)]
                self._header += part
                at += len(part)
                if len(self._header) == self._header_bytes:
                    self._read_header()
        return at

    def _read_header(self) -> None:
        header = self._header
        if self._is_in_frame:
            bits = int.from_bytes(header, "little")
            self._is_last = bool(bits & 1)
            self._num_left = 1 if bits >> 1 & 3 == _RLE_BLOCK else bits >> 3
        elif not header.startswith(_ZSTD_MAGIC):  # a skippable frame, or none
            self._is_last = True
        else:
            from zstandard import frame_header_size

            self._header_bytes = frame_header_size(header)
            if len(header) < self._header_bytes:
                return
            self._is_in_frame, self._header_bytes = True, _ZSTD_BLOCK_HEADER_BYTES
        self._header = b""
