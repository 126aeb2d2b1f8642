"""How deep JSON text is nested, found out without making objects of it."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from nvcli.jobs.rows.raw_values import decode

MAX_LEVELS = 400
"""The most levels of objects and lists in a row, so that whoever handles it later does not run out of stack."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_CHUNK_BYTES = 64 * 1024


def is_deeper(text: bytes, levels: int) -> bool:
    """Tell whether valid JSON has more than `levels` levels of objects and lists.

    Takes about as much memory as the text, whatever it holds.
    """
    if text.count(b"{") + text.count(b"[") <= levels:
        return False
    import numpy as np

    steps = np.zeros(256, np.int32)
    steps[list(b"{[")], steps[list(b"}]")] = 1, -1
    brackets = _STRING.sub(b"", text)
    level = 0
    for start in range(0, len(brackets), _CHUNK_BYTES):
        chunk = np.frombuffer(brackets, np.uint8, min(_CHUNK_BYTES, len(brackets) - start), start)
        inside = np.cumsum(steps[chunk])
        if level + int(inside.max()) > levels:
            return True
        level += int(inside[-1])
    return False


def decode_inner(text: str) -> Any:
    """Decode JSON that stands in a row as a text. Raises msgspec.DecodeError, for too many levels too."""
    data = text.encode()
    try:
        value = decode(data)
        is_deep = is_deeper(data, MAX_LEVELS)
    except RecursionError:
        is_deep = True
    if is_deep:
        raise msgspec.DecodeError(f"nested too deep; allowed: {MAX_LEVELS} levels of objects and lists")
    return value
