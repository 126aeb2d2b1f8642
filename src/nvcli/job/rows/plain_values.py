"""Objects of Python programs and tables, converted to the values that JSON would decode to.

Everything behind the parser encodes or pickles what nvcli's own keys hold. A line of a file holds JSON; an object may
be anything, hold itself, or run code of its own when it is looked at. So it becomes JSON here and comes back as plain
texts, numbers, lists and dicts, which pass the same checks as those of a line.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any
from uuid import UUID

import msgspec

from nvcli.core.validation import is_text, is_utf8
from nvcli.errors import RowError, first_line
from nvcli.job.rows.bad_json import explain_surrogate, find_non_json
from nvcli.job.rows.raw_values import MAX_LEVELS, NestedTooDeep, decode, is_deeper

_encode = msgspec.json.Encoder().encode

_WRITTEN_AS_TEXT = (date, time, timedelta, Decimal, UUID, PurePath)
"""Types that become texts, as a template would show them."""


def plain_value(value: Any, key: str) -> Any:
    """Return the value of one of nvcli's own keys as plain data. Raises RowError that names what is not.

    Tuples become lists, arrays and numbers of numpy (and what is like it) lists and numbers, and subclasses what they
    stand for. Bytes that are UTF-8 become text: some writers of Parquet do not say which columns are texts. A single
    object that is no text, number or collection is returned as it is: whoever reads the key says what it must be.
    """
    try:
        kind = type(value)
        if kind is not str and kind is not dict and kind is not list:
            if isinstance(value, str):
                value = str.__str__(value)
            elif isinstance(value, bytes) and is_utf8(value):
                value = value.decode()
            elif hasattr(value, "tolist") and not isinstance(value, type):
                return plain_value(value.tolist(), key)
            elif not isinstance(value, Collection) or isinstance(value, bytes | bytearray | memoryview):
                return value
        if isinstance(value, str):
            if not (value.isascii() or is_text(value)):
                raise RowError("invalid_value", explain_surrogate(value, key) or key)
            return value
        return value if _holds_ids(value) else _through_json(value, key)
    except RowError:
        raise
    except Exception as error:  # methods of the program's own objects may raise anything
        raise RowError("invalid_value", f"`{key}` cannot be read: {first_line(error)}") from error


def _holds_ids(value: Any) -> bool:
    """Tell whether a value is a list of integers, such as token ids. Their range is checked later."""
    if type(value) is not list or not value or type(value[0]) is not int:
        return False
    try:
        msgspec.convert(value, list[int])
    except Exception:
        return False
    return True


def _through_json(value: Any, key: str) -> Any:
    try:
        data = _encode(value)
        plain = decode(data)
        is_same = bool(plain == value)
    except Exception:  # it holds what msgspec does not know; the slower encoder knows more, and says no to the rest
        is_same = False
    if not is_same:  # msgspec writes bytes and dates as texts, and numbers that are not finite as null
        try:
            data = _encode_all(value).encode()
            plain = decode(data)
        except (TypeError, ValueError, RecursionError, msgspec.DecodeError) as error:
            raise RowError(
                "invalid_value", find_non_json(value, key, _as_builtin) or f"`{key}`: {first_line(error)}"
            ) from None
    if is_deeper(data, MAX_LEVELS - 1):  # the row is a level too
        raise RowError("invalid_value", f"`{key}` is {NestedTooDeep()}")
    return plain


def _as_builtin(value: Any) -> Any:
    """Return an object as a type that JSON has. Raises TypeError."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, _WRITTEN_AS_TEXT):
        return str(value)
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


_encode_all = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=_as_builtin).encode
