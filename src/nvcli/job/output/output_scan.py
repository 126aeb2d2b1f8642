"""Reads an existing output: which rows it answers, and where its valid part ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from nvcli.job.compression import READ_BYTES, CompressionError, Unpacker, compression_of
from nvcli.job.line_splitter import Line, LineSplitter
from nvcli.job.row_set import AnsweredRows
from nvcli.job.rows.output_row import WrittenRow, read_output_row
from nvcli.job.shard import WHOLE, Shard

_MAX_HELD_BYTES = 64 * 1024 * 1024
"""Maximum size of a member's lines that are held until it is known to be complete."""


class OutputScan:
    """The findings. Lines are judged one by one, so that a damaged one costs only its own row."""

    def __init__(self) -> None:
        self.answered = AnsweredRows()
        self.sound_bytes = 0
        """End of the last valid line, or in a compressed file of its member; the rest can be cut off."""
        self.num_damaged = 0
        """Lines before `sound_bytes` that are not rows, or repeat an earlier one."""
        self.is_in_order = True
        """Whether the valid lines are the first rows of the job or its shard, in order and without a gap."""

    @property
    def num_rows(self) -> int:
        return self.answered.all.count


def scan_output(path: Path, shard: Shard = WHOLE) -> OutputScan:
    """Scan the output of a job, or of a shard of it.

    Never raises for what the file holds; raises OSError where it cannot be read.
    """
    scan = OutputScan()
    num_bad = 0  # since the last sound line
    for lines, end in _blocks(path):
        for line in lines:
            row = read_output_row(line) if isinstance(line, bytes) else None
            if row is None or not scan.answered.add(row.index, row.error_type):
                num_bad += 1
                continue
            if row.index != shard.row(scan.num_rows - 1):
                scan.is_in_order = False
            scan.num_damaged += num_bad
            num_bad = 0
            scan.sound_bytes = end
    return scan


def valid_rows(path: Path, seen: AnsweredRows | None = None) -> Iterator[tuple[WrittenRow, bytes]]:
    """Yield the lines that a scan counts as rows, without newline, in the order of the file.

    Rows that are in `seen` are left out, and those that are yielded are added to it.
    """
    seen = seen or AnsweredRows()
    for lines, _ in _blocks(path):
        for line in lines:
            row = read_output_row(line) if isinstance(line, bytes) else None
            if row is not None and isinstance(line, bytes) and seen.add(row.index, row.error_type):
                yield row, line


def _blocks(path: Path) -> Iterator[tuple[list[Line], int]]:
    """Yield complete lines, with the place where the smallest part of the file that holds them ends.

    That part is the line itself, or in a compressed file the member that it is in. Lines of a torn member are not given
    out. A member of up to `_MAX_HELD_BYTES`, as those of an output are, is held until it has ended; a larger one is
    read twice.
    """
    compression = compression_of(path.name)
    with path.open("rb", buffering=0) as file:
        if compression:
            yield from _packed_blocks(file, compression)
        else:
            yield from _plain_blocks(iter(lambda: file.read(READ_BYTES[compression]), b""))


def _splitter() -> LineSplitter:
    """Return a splitter for our own lines, which may be of any length.

    What a lost write leaves is zeros, without an end where the file has a hole. They need not be kept.
    """
    return LineSplitter(max_bytes=None, unwanted=b"\0")


def _plain_blocks(chunks: Iterator[bytes]) -> Iterator[tuple[list[Line], int]]:
    splitter = _splitter()
    at = 0
    for chunk in chunks:
        for line in splitter.feed(chunk):
            at += (len(line) if isinstance(line, bytes) else line.num_bytes) + 1
            yield [line], at


def _packed_blocks(file: IO[bytes], compression: str) -> Iterator[tuple[list[Line], int]]:
    unpacker = Unpacker(compression)
    splitter = _splitter()
    lines: list[Line] = []
    end = num_held = 0
    try:
        while chunk := file.read(READ_BYTES[compression]):
            for plain in unpacker.feed(chunk):
                num_held += len(plain)
                is_held = num_held <= _MAX_HELD_BYTES
                if is_held:
                    lines += splitter.feed(plain)
                else:
                    lines = []
                if unpacker.member_end > end:
                    if is_held:
                        yield lines, unpacker.member_end
                    else:
                        yield from _large_member(file.fileno(), compression, end, unpacker.member_end)
                    end, num_held = unpacker.member_end, 0
                    lines, splitter = [], _splitter()
    except CompressionError:
        return


def _large_member(fd: int, compression: str, begin: int, end: int) -> Iterator[tuple[list[Line], int]]:
    """Yield the lines of a valid member, a few at a time."""
    unpacker = Unpacker(compression)
    splitter = _splitter()
    for at in range(begin, end, READ_BYTES[compression]):
        for plain in unpacker.feed(os.pread(fd, min(READ_BYTES[compression], end - at), at)):
            yield splitter.feed(plain), end
