"""Converts untyped data to typed structs, with errors that a user can act on.

Wraps `msgspec.convert`. Its errors name the key with its full path, the value that was given and what is
allowed; the caller adds where the data came from (file and line, command-line flag, input row). Shared by the
configuration and by the rows of a job, so that both speak the same language.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import cache
from typing import Any, TypeGuard, TypeVar

import msgspec
from msgspec import inspect

from nvcli.core.other_names import own_keys, remarks

T = TypeVar("T")
Path = tuple[str | int, ...]

_WHERE = re.compile(r"^(?P<reason>.*?)(?: - at (?P<is_key>`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<item>\d+|\.\.\.)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_NAMED_KEY = re.compile(r"`(\w+)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")

_LONGEST_NAME = 100
"""Characters of a name that are compared with known names."""

_NEAR = 0.81
"""Similarity (`difflib`) from which names count as a misspelling of each other; `top_n` and `top_p` (0.8) do not."""
_SHORTEST_BEGINNING = 4
"""Minimum length of an abbreviation, such as `temp`."""

_type_info = cache(inspect.type_info)
"""Takes milliseconds for a struct, which a job with many bad rows would spend on each of them."""
_SURROGATE = re.compile("[\ud800-\udfff]")


class InvalidValue(ValueError):
    """A value or key is not allowed. `path` is its place in the data; the message is for the user."""

    def __init__(self, path: Path, message: str, *, unknown_key: bool = False) -> None:
        super().__init__(message)
        self.path = path
        self.message = message
        self.unknown_key = unknown_key


def convert(data: Any, kind: type[T], *, under: Path = ()) -> T:
    """Convert `data` to a `kind`, strictly. `under` is the path of `data` for messages. Raises InvalidValue."""
    try:
        return msgspec.convert(data, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _explain(str(error), data, kind, under) from None


def join_path(path: Path) -> str:
    """Return a path as text: ("sampling", "stop", 0) becomes `sampling.stop[0]`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def show(value: Any, limit: int = 60) -> str:
    """Format a value roughly as its user wrote it, on one line of at most `limit` characters.

    Formats no more than is shown: a row may hold hundreds of megabytes in one value. An object of a program
    may raise anything when it is converted to text.
    """
    if isinstance(value, bytes) and not is_utf8(value):
        return "bytes that are not UTF-8 text"
    try:
        text = _json_beginning(value, limit)
    except RecursionError:
        return "a deeply nested value"
    except Exception:
        try:
            text = str(value)
        except Exception:
            return f"a value of the type `{type(value).__name__}`"
    return shorten(text, limit).encode(errors="backslashreplace").decode()


def _json_beginning(value: Any, limit: int) -> str:
    """Return the beginning of a value as JSON, longer than `limit` characters if the value is."""
    import json

    text = ""
    for piece in json.JSONEncoder(ensure_ascii=False, default=str).iterencode(value):
        text += piece
        if len(text) > limit:
            break
    return text


def shorten(text: str, limit: int = 60) -> str:
    """Cut a text to at most `limit` characters, the last of which is then an ellipsis."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def list_some(names: Sequence[str], most: int) -> str:
    """List the first `most` names, and say how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most:,} more" if len(names) > most else shown


def is_integer(value: object, least: float = -math.inf, most: float = math.inf) -> TypeGuard[int]:
    """Tell whether a value is an integer from `least` to `most`; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def whole_number(value: object) -> object:
    """Return a number without a fraction as an integer, and any other value unchanged: writers of tables make 7.0 of 7
    in a column with gaps, and databases decimals of all integers. Larger numbers than a float (2⁵³) or 64 bits hold
    exactly stay as they are."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, Decimal) and value.is_finite() and abs(value) <= 2**64:
        return int(value) if value == int(value) else value
    return value


def is_text(value: str) -> bool:
    """Tell whether UTF-8 can hold a text.

    It cannot hold lone surrogates, which stand for bytes of file names that are not UTF-8.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_utf8(data: bytes) -> bool:
    """Tell whether bytes are UTF-8 text."""
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def describe_surrogate(text: str) -> str | None:
    """Describe the first lone surrogate in a text; None if it holds none."""
    found = _SURROGATE.search(text)
    return found and f"it holds the lone surrogate \\u{ord(found[0]):04x}, which is half of a character"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the known names that may be meant, or all of them.

    Suggests names with a similar spelling, that begin with the unknown one, or that other tools use for the same thing.
    Says so if the name is known from other tools and has no equivalent here.
    """
    names = list(known)
    name = name[:_LONGEST_NAME]
    meant = [own for key in own_keys().get(name, ()) if (own := _below(key, names))]
    if not meant and name in remarks():
        return remarks()[name]
    meant = meant or [each for each in names if each.casefold() == name.casefold()]
    meant = meant or difflib.get_close_matches(name, names, n=1, cutoff=_NEAR)
    if not meant and len(name) >= _SHORTEST_BEGINNING:
        longer = [each for each in names if each.startswith(name)]
        meant = longer if len(longer) == 1 else []
    return f"did you mean {' or '.join(f'`{each}`' for each in meant)}?" if meant else f"known: {', '.join(names)}"


def _below(key: str, names: list[str]) -> str:
    """Return a key's path from the first of these names on; empty if it holds none of them."""
    steps = key.split(".")
    return next((".".join(steps[depth:]) for depth, step in enumerate(steps) if step in names), "")


def _explain(text: str, data: Any, kind: type, under: Path) -> InvalidValue:
    match = _WHERE.match(text)
    assert match is not None  # the pattern matches any text
    path, value, info = _follow(match["path"] or "", data, _type_info(kind))
    name = join_path(under + path)
    unknown = _UNKNOWN.fullmatch(match["reason"])
    if unknown is not None:
        key = unknown["name"]
        full = under + path + (key,)
        shown = join_path((*under, *path, shorten(key)))
        return InvalidValue(
            full, f"unknown key `{shown}`; {suggest(key, _field_names(_container(info, value)))}", unknown_key=True
        )
    if (missing := _MISSING.fullmatch(match["reason"])) is not None:
        return InvalidValue(under + path, f"`{name}` is {show(value)}, which lacks the key `{missing['name']}`; add it")
    if not match["reason"].startswith(("Expected ", "Invalid enum value")):
        # A struct's own __post_init__: complete as it is, with the first key that it names at fault.
        key = _NAMED_KEY.search(match["reason"])
        inner = (key[1],) if key is not None and isinstance(value, dict) and key[1] in value else ()
        return InvalidValue(under + path + inner, match["reason"])
    if match["is_key"]:
        allowed = info.key_type if isinstance(info, inspect.DictType) else inspect.StrType()
        key = next((key for key in value if not _fits_key(key, allowed)), "")
        return InvalidValue(under + path, f"{name or 'top level'}: the key {show(key)} is not {describe(allowed)}")
    return InvalidValue(under + path, f"`{name}` is {show(value)}; allowed: {describe(info)}")


def _follow(steps: str, data: Any, info: inspect.Type) -> tuple[Path, Any, inspect.Type]:
    """Follow msgspec's path (`.job.order`, `.stop[0]`, `.logit_bias[...]`) through the data and its type."""
    path: Path = ()
    for step in _STEP.finditer(steps):
        info = _container(info, data)
        if isinstance(info, inspect.StructType):
            field = next(field for field in info.fields if field.encode_name == step["name"])
            path, data, info = (*path, field.encode_name), data[field.encode_name], field.type
        elif isinstance(info, inspect.DictType):
            value_type = info.value_type
            key = next((key for key, value in data.items() if not _fits(value, value_type)), None)
            path = path if key is None else (*path, key)
            data, info = data if key is None else data[key], value_type
        elif isinstance(info, inspect.ListType):
            index = int(step["item"])
            path, data, info = (*path, index), data[index], info.item_type
    return path, data, info if steps else _container(info, data)


def _container(info: inspect.Type, value: Any) -> inspect.Type:
    """Return the member of a union that a path through the value goes through."""
    if isinstance(info, inspect.UnionType):
        inner = inspect.ListType if isinstance(value, list | tuple) else inspect.StructType | inspect.DictType
        return next((part for part in info.types if isinstance(part, inner)), info)
    return info


def _fits(value: Any, info: inspect.Type) -> bool:
    """Tell whether a text is one, or a number is within its bounds, to find the wrong entry of a mapping."""
    if isinstance(info, inspect.StrType):
        return isinstance(value, str)
    if not isinstance(info, inspect.IntType | inspect.FloatType):
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return (
        (info.ge is None or value >= info.ge)
        and (info.gt is None or value > info.gt)
        and (info.le is None or value <= info.le)
        and (info.lt is None or value < info.lt)
    )


def _fits_key(key: Any, info: inspect.Type) -> bool:
    if isinstance(info, inspect.IntType):
        try:
            return _fits(int(key), info)
        except (TypeError, ValueError):
            return False
    return isinstance(key, str)


def _field_names(info: inspect.Type) -> list[str]:
    return [field.encode_name for field in info.fields] if isinstance(info, inspect.StructType) else []


def describe(info: inspect.Type) -> str:
    """Describe in words which values a type allows."""
    match info:
        case inspect.UnionType():
            parts = sorted(_with_one_literal(info.types), key=lambda part: isinstance(part, inspect.ListType))
            return " or ".join(map(describe, parts))  # what follows a list would seem to be said of its items
        case inspect.IntType() | inspect.FloatType():
            return _describe_number(info)
        case inspect.LiteralType():
            return ", ".join(str(value) for value in info.values)
        case inspect.ListType():
            least, most = info.min_length, info.max_length
            bounds = f" of {least or 0:,} to {most:,} items" if most else " that is not empty" if least else ""
            return f"a list{bounds}, each item {describe(info.item_type)}"
        case inspect.StructType():
            return f"an object with the keys {', '.join(_field_names(info))}"
        case inspect.DictType():
            return "an object with keys"
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text that is not empty" if info.min_length else "text"
        case inspect.NoneType():
            return "null"
        case _:
            return "anything"


def _with_one_literal(types: tuple[inspect.Type, ...]) -> list[inspect.Type]:
    """Return the members of a union, with all of its literals merged into the first."""
    literals = [part for part in types if isinstance(part, inspect.LiteralType)]
    merged = inspect.LiteralType(tuple(value for part in literals for value in part.values))
    return (
        [merged if part is literals[0] else part for part in types if part not in literals[1:]]
        if literals
        else [*types]
    )


def _describe_number(info: inspect.IntType | inspect.FloatType) -> str:
    noun = "an integer" if isinstance(info, inspect.IntType) else "a number"
    if info.ge is not None and info.le is not None:
        return f"{noun} from {info.ge} to {info.le}"
    low = f"of at least {info.ge}" if info.ge is not None else f"above {info.gt}" if info.gt is not None else ""
    high = f"at most {info.le}" if info.le is not None else f"below {info.lt}" if info.lt is not None else ""
    return f"{noun} {' and '.join(bound for bound in (low, high) if bound)}".strip()
