"""Explains why a line or an object is not JSON, in words that help to find the place."""

from __future__ import annotations

import codecs
import contextlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from nvcli.core.validation import describe_surrogate
from nvcli.job.rows.raw_values import MAX_LEVELS

_EXPLAINED_BYTES = 1 << 20
"""Longer texts are not parsed again: Python objects may take thirty times their size."""
_MAX_BITS = 4300 * 3.33
"""Python does not convert longer integers to decimal digits."""


def explain_bad_json(line: bytes, reason: str) -> str:
    """Return the message for a line that msgspec refuses with `reason`.

    Python's laxer parser finds the key of a number or a character that JSON does not have.
    """
    found = None
    if line.startswith(codecs.BOM_UTF8):
        found = "it begins with a byte order mark (U+FEFF), as where files were joined; remove the mark"
    elif b"}\r{" in line:
        found = "a carriage return stands between two rows, which end with newlines; `tr '\\r' '\\n'` may fix that"
    elif len(line) <= _EXPLAINED_BYTES:
        with contextlib.suppress(ValueError, RecursionError):
            found = find_non_json(json.loads(line.decode(errors="surrogatepass")), "")
    return f"not valid JSON: {found or reason.removeprefix('JSON is malformed: ')}"


def explain_bad_utf8(line: bytes, reason: str) -> str:
    """Return the message for a line that is not UTF-8, for which the decoder says `reason`."""
    surrogate = None
    if len(line) <= _EXPLAINED_BYTES:
        with contextlib.suppress(UnicodeDecodeError):
            surrogate = describe_surrogate(line.decode(errors="surrogatepass"))
    return f"not UTF-8 text ({surrogate or reason})"


def explain_bad_value(value: bytes, key: str) -> str:
    """Return the message for a value of `key` that is JSON but has a number or character that msgspec cannot decode."""
    found = None
    if len(value) <= _EXPLAINED_BYTES:
        with contextlib.suppress(RecursionError):
            found = find_non_json(json.loads(value, parse_int=_no_number), key)
    return found or f"`{key}` holds a number that is too large"


def _no_builtin(value: Any) -> Any:
    raise TypeError


def _no_number(digits: str) -> None:
    """Ignore integers: Python refuses to read those of thousands of digits."""


def find_non_json(value: Any, name: str, as_builtin: Callable[[Any], Any] = _no_builtin) -> str | None:
    """Describe the first thing in a value that JSON cannot represent, and its key; None if there is none.

    `name` is that of the value; empty: it is a row. `as_builtin` returns another object as one that JSON has, and
    raises TypeError where there is none.
    """
    levels = [iter([(name, value)])]
    while levels:
        step = next(levels[-1], None)
        if step is None:
            levels.pop()
            continue
        where, inner = step
        if len(levels) > MAX_LEVELS:
            return f"{_quoted(name)} is nested too deep, or holds itself"
        if not isinstance(inner, str | int | float | dict | list | tuple | None):
            try:
                inner = as_builtin(inner)
            except TypeError:
                return f"`{where}` is an object of the type `{type(inner).__name__}`, which JSON does not have"
        if (problem := _problem_of(inner, where)) is not None:
            return problem
        if isinstance(inner, dict | list | tuple):
            levels.append(_inside(inner, where))
    return None


def _inside(value: dict[Any, Any] | list[Any] | tuple[Any, ...], name: str) -> Iterator[tuple[str, Any]]:
    """Yield the items of a collection, with names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{name}.{key}" if name else str(key), inner
    else:
        for number, inner in enumerate(value):
            yield f"{name}[{number}]", inner


def explain_surrogate(text: str, name: str) -> str | None:
    """Describe half a character in a text; None if there is none."""
    surrogate = describe_surrogate(text)
    return surrogate and f"`{name or 'the value'}` is not text: {surrogate}"


def _problem_of(value: Any, name: str) -> str | None:
    """Describe why JSON cannot represent a value, ignoring its items."""
    if isinstance(value, str):
        return explain_surrogate(value, name)
    if isinstance(value, float) and not math.isfinite(value):
        return f"`{name or 'the value'}` is not a finite number"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"`{name or 'the value'}` is a number that is too large"
    for key in value if isinstance(value, dict) else ():
        if not isinstance(key, str | int | float | None):
            return f"{_quoted(name)} has a key of the type `{type(key).__name__}`; keys are texts"
        if isinstance(key, str) and (surrogate := describe_surrogate(key)):
            return f"a key of {_quoted(name)} is not text: {surrogate}"
    return None


def _quoted(name: str) -> str:
    return f"`{name}`" if name else "the row"
