"""The values of a row as read: JSON that is not decoded yet, or the objects of a table.

JSON is held to a number of levels, so that whoever handles a row later does not run out of stack. NaN and Infinity,
which Python's `json` writes and JSON does not have, become null in values that are copied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

MAX_LEVELS = 400
"""Maximum depth of objects and lists in a row."""
_NULL = b"null"
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRINGS = re.compile(_STRING, re.DOTALL)
_WORDS = re.compile(_STRING + rb"|(?<=[\[:,\s])-?(?:NaN|Infinity)(?=[\]},\s])", re.DOTALL)
"""Whole texts, so that what stands in them is passed over, and the words outside of texts."""
_EXPONENT = 999_999
_CHUNK_BYTES = 64 * 1024

_Value = TypeVar("_Value")

decode = msgspec.json.Decoder().decode
decode_row = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
check_json = msgspec.json.Decoder(msgspec.Raw).decode
_encode = msgspec.json.Encoder(enc_hook=str).encode  # tables hold values that JSON does not have


class NestedTooDeep(msgspec.DecodeError):
    """JSON has more than `MAX_LEVELS` levels."""

    def __init__(self) -> None:
        super().__init__(f"nested too deep; allowed: {MAX_LEVELS} levels of objects and lists")


def is_null(value: Any) -> bool:
    """Tell whether a value is null, which in every format is the same as a missing key. So are NaN and Infinity, as
    which pandas has the gaps of its columns."""
    if isinstance(value, msgspec.Raw):
        return bytes(memoryview(value)[:4]) == _NULL
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def as_json(value: Any) -> msgspec.Raw:
    """Return a value as a copy of its JSON, so that it does not keep its whole line in memory."""
    return value.copy() if isinstance(value, msgspec.Raw) else msgspec.Raw(_encode(value))


def as_text(value: Any) -> str:
    """Return a text unchanged, bytes as the UTF-8 text that they are, and any other value as JSON. Raises
    UnicodeDecodeError."""
    if isinstance(value, bytes):
        return value.decode()
    raw = value if isinstance(value, msgspec.Raw) else msgspec.Raw(_encode(value))
    data = bytes(raw)
    return str(decode(raw)) if data.startswith(b'"') else data.decode()


def without_nulls(value: Any) -> Any:
    """Return a value of a table without null values at any level.

    What is nested too deep for that is returned as it is: the parser refuses it.
    """
    try:
        return _without_nulls(value)
    except RecursionError:
        return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def decode_within(data: bytes, decode: Callable[[bytes], _Value] = decode) -> _Value:
    """Decode JSON of at most `MAX_LEVELS` levels. Raises msgspec.DecodeError, which NestedTooDeep is."""
    try:
        value = decode(data)
    except RecursionError:
        raise NestedTooDeep from None
    if is_deeper(data, MAX_LEVELS):
        raise NestedTooDeep
    return value


def decode_inner(text: str) -> Any:
    """Decode JSON that a row holds as a text. Raises as `decode_within` does."""
    return decode_within(text.encode())


def decode_list(value: Any) -> Any:
    """Return the list in a text of JSON, and any other value unchanged. Raises as `decode_within` does."""
    return decode_nested(value, ("[",))


def decode_nested(value: Any, brackets: tuple[str, ...] = ("[", "{")) -> Any:
    """Return the list or object in a text of JSON, and any other value unchanged. Raises as `decode_within` does."""
    return decode_inner(value) if isinstance(value, str) and value.lstrip().startswith(brackets) else value


def is_deeper(text: bytes, levels: int) -> bool:
    """Tell whether valid JSON has more than `levels` levels of objects and lists, without making objects of it.

    Takes about as much memory as the text, whatever it holds.
    """
    if text.count(b"{") + text.count(b"[") <= levels:
        return False
    import numpy as np

    steps = np.zeros(256, np.int32)
    steps[list(b"{[")], steps[list(b"}]")] = 1, -1
    brackets = _STRINGS.sub(b"", text)
    level = 0
    for start in range(0, len(brackets), _CHUNK_BYTES):
        chunk = np.frombuffer(brackets, np.uint8, min(_CHUNK_BYTES, len(brackets) - start), start)
        inside = np.cumsum(steps[chunk])
        if level + int(inside.max()) > levels:
            return True
        level += int(inside[-1])
    return False


class MarkedLine(msgspec.Struct, frozen=True):
    """A line in which a number that no float can hold replaces NaN and Infinity.

    Inside the values of nvcli's own keys such a number is refused; anywhere else it becomes null.
    """

    line: bytes
    mark: bytes
    """The number, which occurs nowhere else in the line."""

    def with_nulls(self, values: Mapping[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
        """Return the values of the line with null instead of the mark."""
        return {key: msgspec.Raw(bytes(value).replace(self.mark, _NULL)) for key, value in values.items()}

    def with_null_values(self, values: Mapping[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
        """Return the values of the line with null for those that are the mark."""
        return {key: msgspec.Raw(_NULL) if bytes(value) == self.mark else value for key, value in values.items()}


def mark_nonfinite(line: bytes) -> MarkedLine | None:
    """Mark NaN and Infinity in a line that is not JSON; None if it has neither."""
    exponent = _EXPONENT
    while (mark := b"1e%d" % exponent) in line:
        exponent += 1
    marked = _WORDS.sub(lambda found: found[0] if found[0].startswith(b'"') else mark, line)
    return None if marked == line else MarkedLine(marked, mark)


def became_null(value: Any, kept: Any) -> bool:
    """Tell whether a table's value holds NaN or Infinity, which became null in `kept`."""
    if not isinstance(kept, msgspec.Raw) or not isinstance(value, float | list | dict):
        return False
    return _NULL in bytes(kept) and _holds_nonfinite(value)


def _holds_nonfinite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_holds_nonfinite, inner))
