"""JsonFile: a JSON object of a checkpoint, read key by key with errors that name the file and the key. Torch-free."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from nvcli.errors import LoadError

T = TypeVar("T", int, float, bool, str)

_LEAST, _MOST = 1e-30, 1e30
"""Bounds of positive numbers that are not sizes: their inverses, times a position, are finite in float32."""


class JsonFile:
    """A JSON object that remembers where it came from, for messages."""

    def __init__(self, path: Path, values: Mapping[str, Any], section: str = "") -> None:
        self.path = path
        self.values = values
        self.section = section

    @classmethod
    def read(cls, path: Path) -> JsonFile:
        """Read a file that must be there. Raises LoadError that names the file."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise LoadError(
                f"{path}: no such file; a model is a folder in Hugging Face layout (config.json, weights, tokenizer)"
            ) from None
        except OSError as error:
            raise LoadError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:  # bad JSON or bad UTF-8
            raise LoadError(f"{path}: not valid JSON ({error}); download the file again") from None
        if not isinstance(values, dict):
            raise LoadError(f"{path}: holds a {type(values).__name__} where a JSON object belongs")
        return cls(path, values)

    @classmethod
    def read_if_present(cls, path: Path) -> JsonFile:
        """Read a file, or take a file that is not there for an empty object."""
        return cls.read(path) if path.exists() else cls(path, {})

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key`. Where it is absent or null, it is `default`, and without one that is an error."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "missing")
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if kind is float and is_number:
            if not abs(value) <= sys.float_info.max:
                raise self.error(key, f"{value!r:.40} is not a finite number")
            value = float(value)
        if not isinstance(value, kind) or (kind is int and not is_number):
            raise self.error(key, f"{value!r} is not of type {kind.__name__}")
        return value

    def positive(self, key: str) -> int:
        """The value of `key`, which must be there and above zero."""
        value = self.get(key, int)
        if value <= 0:
            raise self.error(key, f"{value} is not positive")
        return value

    def positive_number(self, key: str, default: float | None = None) -> float:
        """The value of `key`, a number above zero that float32 can divide by. Where it is absent or null, it is
        `default`, and without one that is an error."""
        value = self.get(key, float, default)
        if not _LEAST <= value <= _MOST:  # NaN is neither
            raise self.error(key, f"{value:g} is not a number from {_LEAST:g} to {_MOST:g}")
        return value

    def error(self, key: str, problem: str) -> LoadError:
        """The error that names the file, the key and what is wrong with its value."""
        return LoadError(f"{self.path}: `{self.section}{key}`: {problem}")
