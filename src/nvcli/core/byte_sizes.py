"""Byte sizes as people write and read them."""

from __future__ import annotations

import re

_SIZE = re.compile(r"\s*(?P<number>\d{1,18}(?:\.\d{1,18})?)\s*(?P<unit>[a-z]*)\s*", re.IGNORECASE)
_UNIT_BYTES = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024), ("", 1024))
}


def parse_size(size: str | int | None) -> int | None:
    """Parse a size such as `512MiB` or `512M` (1024²), or `2GB` (1000³) to bytes. Raises ValueError for other texts."""
    if size is None or isinstance(size, int):
        return size
    match = _SIZE.fullmatch(size)
    unit_bytes = _UNIT_BYTES.get(match["unit"].lower()) if match else None
    if match is None or unit_bytes is None:
        raise ValueError("allowed: a number of bytes, or a size such as 512MiB, 2GiB, 2G (the same) or 2GB")
    num_bytes = int(float(match["number"]) * unit_bytes)
    if num_bytes < 1:
        raise ValueError("allowed: at least one byte")
    return num_bytes


def format_bytes(num_bytes: float) -> str:
    """Format a size, such as `1.50 GiB`."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.2f} {units[0]}"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: `1 row`, `2,000 rows`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
