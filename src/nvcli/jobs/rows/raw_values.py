"""The values of a row as they are read: JSON that is not decoded yet, or the objects of a table."""

from __future__ import annotations

from typing import Any

import msgspec

_NULL = b"null"

decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder(enc_hook=str).encode  # tables hold values that JSON does not have


def is_null(value: Any) -> bool:
    """Tell whether a value is null, which means in every format that its key is left out."""
    return value is None or (isinstance(value, msgspec.Raw) and bytes(memoryview(value)[:4]) == _NULL)


def as_json(value: Any) -> msgspec.Raw:
    """Return a value as JSON in memory of its own, so that it does not keep its whole line there."""
    return value.copy() if isinstance(value, msgspec.Raw) else msgspec.Raw(_encode(value))


def as_text(value: Any) -> str:
    """Return a text as it is, and any other value as the JSON that it is."""
    raw = value if isinstance(value, msgspec.Raw) else msgspec.Raw(_encode(value))
    data = bytes(raw)
    return str(decode(raw)) if data.startswith(b'"') else data.decode()


def without_nulls(value: Any) -> Any:
    """Return a value of a table without the keys whose value is null, in nested values too.

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
