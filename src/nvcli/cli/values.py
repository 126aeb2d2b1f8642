"""Values of options, as they were typed: numbers and words, with errors in the words of the configuration.

Options are declared as text, so that what is wrong with a value is said here or by the configuration, in one style,
and not by the library that splits the command line.
"""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec import inspect

from nvcli.errors import ConfigError
from nvcli.validation import InvalidValue, convert, describe

T = TypeVar("T")


def plain_value(text: str | None) -> int | float | str | None:
    """Return the number that a text spells, or the text itself; the configuration says which of them are allowed."""
    for kind in (int, float):
        try:
            return kind(text) if text is not None else None
        except ValueError:
            continue
    return text


def option_value(flag: str, text: str, kind: Any, result: type[T]) -> T:
    """Return the value of an option that is no key of the configuration.

    `kind` is a type that msgspec can check, such as `Annotated[int, Meta(ge=1)]`, and `result` is the class of its
    values. Raises ConfigError that names the flag, the text and what is allowed.
    """
    try:
        value = convert(plain_value(text), kind)
    except InvalidValue:
        raise ConfigError(f"{flag} {text}: allowed: {describe(inspect.type_info(kind))}") from None
    assert isinstance(value, result)
    return value


def optional_value(flag: str, text: str | None, kind: Any, result: type[T]) -> T | None:
    """Return what `option_value` returns, or None where the option was not given."""
    return None if text is None else option_value(flag, text, kind, result)
