"""Why a line is not JSON, in words that help to find the place."""

from __future__ import annotations

import json
from typing import Any


def explain_bad_json(line: bytes, reason: str) -> str:
    """`reason` is msgspec's. Python's laxer parser finds the key of a number that JSON does not have."""
    try:
        key = _find_non_finite(json.loads(line), "")
    except (ValueError, RecursionError):
        key = None
    if key is not None:
        return f"`{key}` is not a finite number"
    return f"not valid JSON: {reason.removeprefix('JSON is malformed: ')}"


def _find_non_finite(value: Any, name: str) -> str | None:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return name or "the value"
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{name}.{key}" if name else key, inner) for key, inner in value.items()]
    elif isinstance(value, list):
        items = [(f"{name}[{number}]", inner) for number, inner in enumerate(value)]
    return next((found for key, inner in items if (found := _find_non_finite(inner, key)) is not None), None)
