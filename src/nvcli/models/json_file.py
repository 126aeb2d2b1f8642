"""JsonFile: a JSON object of a checkpoint, read key by key with errors that name the file and the key. Torch-free."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

from nvcli.core.config_types import MAX_INT32
from nvcli.core.system.regular_file import read_regular
from nvcli.core.validation import show
from nvcli.errors import LoadError

T = TypeVar("T", int, float, bool, str)
V = TypeVar("V")

_LEAST, _MOST = 1e-30, 1e30
"""Bounds of positive numbers that are not sizes, so that their inverse times a position is finite in float32."""
_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
NO_NAMES: Mapping[str, str] = MappingProxyType({})
GIT_LFS = b"version https://git-lfs"
"""The beginning of the text that git leaves in place of a large file."""
GET_LFS = "git left a reference in place of this file; run `git lfs pull` in its folder, or download it"
_MOST_BYTES = 100_000_000
"""The largest JSON file of a checkpoint that is read; the largest known index is about a hundredth of this."""


def read_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint. Raises LoadError naming the file, and FileNotFoundError if there is none."""
    try:
        text = read_regular(path, most_bytes=_MOST_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LoadError(f"{path}: cannot be read: {error.strerror}; download the file again") from None
    try:
        return json.loads(text.decode("utf-8"))
    except RecursionError:
        raise LoadError(f"{path}: nested too deeply to be read; download the file again") from None
    except ValueError as error:  # bad JSON or bad UTF-8
        problem = GET_LFS if text.startswith(GIT_LFS) else f"not valid JSON ({error}); download the file again"
        raise LoadError(f"{path}: {problem}") from None


class JsonFile:
    """A JSON object that remembers where it came from, for messages."""

    def __init__(
        self,
        path: Path,
        values: Mapping[str, Any],
        section: str = "",
        changed: Collection[str] = (),
        names_in_file: Mapping[str, str] = NO_NAMES,
    ) -> None:
        self.path = path
        self.values = values
        self.section = section
        self.changed = changed
        """The file's top-level keys under which a user has changed something (`hf_overrides`)."""
        self.names_in_file = names_in_file
        """The names that the file has for keys, where these differ."""

    @classmethod
    def read(
        cls, path: Path, *, what: str = "a model is a folder in Hugging Face layout (config.json, weights, tokenizer)"
    ) -> JsonFile:
        """Read a file that must exist. `what` says where it belongs. Raises LoadError naming the file."""
        try:
            values = read_json(path)
        except FileNotFoundError as error:
            way_out = "download the file again" if path.is_symlink() else what
            raise LoadError(f"{path}: {error.strerror}; {way_out}") from None
        if not isinstance(values, dict):
            raise LoadError(f"{path}: holds {show(values)} where a JSON object belongs; download the file again")
        return cls(path, values)

    @classmethod
    def read_if_present(cls, path: Path) -> JsonFile:
        """Read a file, or return an empty object if it does not exist. A dangling link is an error."""
        return cls.read(path) if os.path.lexists(path) else cls(path, {})

    def with_values(self, values: Mapping[str, Any], section: str | None = None) -> Self:
        """Return another section of the file, or this one with other values (`section` None)."""
        return type(self)(
            self.path, values, self.section if section is None else section, self.changed, self.names_in_file
        )

    def with_defaults(self, values: Mapping[str, Any]) -> Self:
        """Return this section with values for keys that it does not have."""
        return self.with_values({**values, **self.values})

    def replacing(self, **values: Any) -> Self:
        """Return this section with other values of some keys."""
        return self.with_values({**self.values, **values})

    def with_names(self, names: Mapping[str, str]) -> Self:
        """Return this section with values of keys that have names of their own in it: these → those that are read."""
        found = {key: own for own, key in names.items() if self.has(own)}
        values = {**self.values, **{key: self.values[own] for key, own in found.items()}}
        absent = {key: own for own, key in names.items() if key not in values}
        return type(self)(self.path, values, self.section, self.changed, {**absent, **found})

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return the value of `key`, or `default` if it is absent or null. Without a default, that is an error."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "null where a value belongs" if key in self.values else "missing")
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if kind is float and is_number:
            if not abs(value) <= sys.float_info.max:
                raise self.error(key, f"{show(value)} is not a finite number")
            value = float(value)
        if not isinstance(value, kind) or (kind is int and not is_number):
            raise self.error(key, f"{show(value)} is not {_KINDS[kind]}")
        return value

    def has(self, key: str) -> bool:
        """Whether `key` is present and not null."""
        return self.values.get(key) is not None

    def object(self, key: str) -> Self:
        """Return the section `key`, which is empty if it is absent or null."""
        values = self.values.get(key)
        if not isinstance(values, dict | None):
            raise self.error(key, f"{show(values)} is not an object")
        return self.with_values(values or {}, f"{self.section}{key}.")

    def choice(self, key: str, supported: Mapping[str, V], default: str) -> V:
        """Return what `supported` has for the value of `key`, or for `default` if it is absent or null."""
        value = self.values[key] if self.has(key) else default
        if not isinstance(value, str) or value not in supported:
            raise self.error(key, f"{show(value)} is not supported; supported: {', '.join(supported)}")
        return supported[value]

    def only(self, **computed: str | int | float | bool) -> None:
        """Raise LoadError if a key is present and neither null nor the only value of it that is computed."""
        for key, wanted in computed.items():
            value = self.values.get(key)
            if value is not None and value != wanted:
                raise self.error(key, f"{show(value)} is not supported; supported: {show(wanted)}")

    def positive(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_INT32) -> int:
        """Return the value of `key`, which must be above zero, at least `least` and at most `most`, or `default` if it
        is absent or null. Without a default, that is an error."""
        value = self.get(key, int, default)
        if value <= 0:
            raise self.error(key, f"{show(value)} is not positive")
        if value < least:
            raise self.error(key, f"{show(value)} is too small; allowed: from {least} on")
        if value > most:
            raise self.error(key, f"{show(value)} is too large; allowed: up to {most:,}")
        return value

    def positive_number(self, key: str, default: float | None = None) -> float:
        """Return the value of `key`, a number above zero that float32 can divide by, or `default` if it is absent or
        null. Without a default, that is an error."""
        value = self.get(key, float, default)
        if not _LEAST <= value <= _MOST:  # NaN is neither
            raise self.error(key, f"{show(value)} is not a number above zero; allowed: from {_LEAST:g} to {_MOST:g}")
        return value

    def name(self, key: str) -> str:
        """Return the name that a key has in the file."""
        return self.names_in_file.get(key, key)

    def error(self, key: str, problem: str) -> LoadError:
        """Return the error that names the file, the key and what is wrong with its value."""
        name = f"{self.section}{self.name(key)}"
        changed = ", changed by `hf_overrides`" if name.partition(".")[0] in self.changed else ""
        return LoadError(f"{self.path}{changed}: `{name}`: {problem}")
