"""Says why a line is not JSON, in words that help to find the place."""

from __future__ import annotations

import json
import math
from typing import Any

from nvcli.validation import describe_surrogate


def explain_bad_json(line: bytes, reason: str) -> str:
    """Return the message for a line that msgspec refuses with `reason`.

    Python's laxer parser finds the key of a number or a character that JSON does not have.
    """
    try:
        found = _find_wrong(json.loads(line.decode(errors="surrogatepass")), "")
    except (ValueError, RecursionError):
        found = None
    return found or f"not valid JSON: {reason.removeprefix('JSON is malformed: ')}"


def explain_bad_utf8(line: bytes, reason: str) -> str:
    """Return the message for a line that is not UTF-8, for which the decoder says `reason`."""
    try:
        surrogate = describe_surrogate(line.decode(errors="surrogatepass"))
    except UnicodeDecodeError:
        surrogate = None
    return f"not UTF-8 text ({surrogate or reason})"


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
