"""NaN and Infinity, which Python's `json` writes and JSON does not have: in values that are copied they become null.

A line that holds them is parsed with another number in their place, which no float can hold: nvcli's own keys refuse
it, as they refuse any such number, and in all other values it becomes null.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

_WORDS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|(?<=[\[:,\s])-?(?:NaN|Infinity)(?=[\]},\s])', re.DOTALL)
"""Whole texts, so that what stands in them is passed over, and the words outside of texts."""
_EXPONENT = 999_999


class MarkedLine(msgspec.Struct, frozen=True):
    """A line with a number in the places of NaN and Infinity."""

    line: bytes
    mark: bytes
    """That number, which the line has nowhere else."""

    def with_nulls(self, values: Mapping[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
        """Return the values of the line with null in these places."""
        return {key: msgspec.Raw(bytes(value).replace(self.mark, b"null")) for key, value in values.items()}


def mark_nonfinite(line: bytes) -> MarkedLine | None:
    """Mark the places of NaN and Infinity in a line that is no JSON; None: it has none of them."""
    exponent = _EXPONENT
    while (mark := b"1e%d" % exponent) in line:
        exponent += 1
    marked = _WORDS.sub(lambda found: found[0] if found[0].startswith(b'"') else mark, line)
    return None if marked == line else MarkedLine(marked, mark)


def became_null(value: Any, kept: Any) -> bool:
    """Tell whether a table's value holds NaN or Infinity, and so has null in the JSON that is kept of it."""
    if not isinstance(kept, msgspec.Raw) or not isinstance(value, float | list | dict):
        return False
    return b"null" in bytes(kept) and _holds_nonfinite(value)


def _holds_nonfinite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_holds_nonfinite, inner))
