"""Says why a line is not JSON, in words that help to find the place."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

from nvcli.validation import describe_surrogate

_EXPLAINED_BYTES = 1 << 20
"""Longer texts are not parsed again: as Python objects they may take thirty times their size."""


def explain_bad_json(line: bytes, reason: str) -> str:
    """Return the message for a line that msgspec refuses with `reason`.

    Python's laxer parser finds the key of a number or a character that JSON does not have.
    """
    found = None
    if len(line) <= _EXPLAINED_BYTES:
        with contextlib.suppress(ValueError, RecursionError):
            found = _find_wrong(json.loads(line.decode(errors="surrogatepass")), "")
    return found or f"not valid JSON: {reason.removeprefix('JSON is malformed: ')}"


def explain_bad_utf8(line: bytes, reason: str) -> str:
    """Return the message for a line that is not UTF-8, for which the decoder says `reason`."""
    surrogate = None
    if len(line) <= _EXPLAINED_BYTES:
        with contextlib.suppress(UnicodeDecodeError):
            surrogate = describe_surrogate(line.decode(errors="surrogatepass"))
    return f"not UTF-8 text ({surrogate or reason})"


def explain_bad_value(value: bytes, key: str) -> str:
    """Return the message for a value of `key` that is JSON and that msgspec cannot decode: it holds a number or a
    character that is none."""
    found = None
    if len(value) <= _EXPLAINED_BYTES:
        with contextlib.suppress(RecursionError):
            found = _find_wrong(json.loads(value, parse_int=_no_number), key)
    return found or f"`{key}` holds a number that is too large"


def _no_number(digits: str) -> None:
    """Integers are not looked at: Python refuses to read those of thousands of digits."""


def _find_wrong(value: Any, name: str) -> str | None:
    """Say what JSON does not allow in a value, and in which key; None if there is nothing of the kind."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"`{name or 'the value'}` is not a finite number"
    if isinstance(value, str):
        surrogate = describe_surrogate(value)
        return surrogate and f"not valid JSON: `{name or 'the value'}` is no text: {surrogate}"
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        for key in value:
            if surrogate := describe_surrogate(key):
                return f"not valid JSON: a key of `{name or 'the row'}` is no text: {surrogate}"
        items = [(f"{name}.{key}" if name else key, inner) for key, inner in value.items()]
    elif isinstance(value, list):
        items = [(f"{name}[{number}]", inner) for number, inner in enumerate(value)]
    return next((found for key, inner in items if (found := _find_wrong(inner, key)) is not None), None)
