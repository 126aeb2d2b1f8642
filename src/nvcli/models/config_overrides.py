"""`hf_overrides`: values by which a user replaces those of a checkpoint's config.json. Torch-free.

An override that nothing reads, such as a misspelled key, would silently leave the model as it is, so it is an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from nvcli.errors import ConfigError, LoadError
from nvcli.models.json_file import JsonFile

NO_OVERRIDES: Mapping[str, Any] = MappingProxyType({})

_ROPE_KEYS = {"rope_scaling": "rope_parameters", "rope_parameters": "rope_scaling"}
"""Two names of the same section; a file has one of them."""
_PROBES: tuple[Any, ...] = (None, False, True, [""])
"""Probe values: code that reads a key distinguishes some of them, or refuses one."""


class UnreadOverride(ConfigError):
    """An override that changes nothing, at the path `key` below `hf_overrides`."""

    def __init__(self, message: str, key: tuple[str, ...]) -> None:
        super().__init__(message)
        self.key = key


def with_overrides(file: JsonFile, overrides: Mapping[str, Any]) -> JsonFile:
    """Return a config.json with `overrides` applied; mappings are merged key by key."""
    if not overrides:
        return file
    changed = {*overrides, *(_ROPE_KEYS[key] for key in overrides if key in _ROPE_KEYS)}
    return JsonFile(file.path, _merged(file.values, overrides), file.section, changed)


def check_overrides(file: JsonFile, overrides: Mapping[str, Any], read: Callable[[JsonFile], object]) -> None:
    """Raise UnreadOverride if `read` ignores an override, whatever its value.

    `read` parses a config.json, and raises LoadError or ConfigError for values that it refuses.
    """
    if not overrides:
        return
    wanted = read(with_overrides(file, overrides))
    for path in _leaves(overrides):

        def with_value(value: Any, path: tuple[str, ...] = path) -> object:
            return read(with_overrides(file, _replaced(overrides, path, value)))

        if is_read(with_value, wanted):
            continue
        raise UnreadOverride(
            f"`hf_overrides`: `{'.'.join(path)}` changes nothing: nvcli reads no such key of {file.path} for this model"
            f"{_suggestion(path, file.values)}",
            path,
        )


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in overrides.items():
        other = _ROPE_KEYS.get(key)
        if other is not None and isinstance(value, Mapping) and "type" in value:
            value = {"rope_type": value["type"], **value}  # the older name
        if other is not None and not values.get(key) and values.get(other):
            key = other
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _leaves(values: Mapping[str, Any], under: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each value that is not a mapping with keys of its own."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*under, key))
        else:
            yield *under, key


def _replaced(overrides: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return the overrides with another value at a path."""
    key, *rest = path
    return {**overrides, key: _replaced(overrides[key], tuple(rest), value) if rest else value}


def is_read(with_value: Callable[[Any], object], wanted: object) -> bool:
    """Whether a reader looks at a value. `with_value` reads the whole with another value in its place, and raises
    LoadError or ConfigError if it refuses that; `wanted` is the result with the value itself."""
    for probe in _PROBES:
        try:
            if with_value(probe) != wanted:
                return True
        except (LoadError, ConfigError):
            return True
    return False


def _suggestion(path: tuple[str, ...], values: Mapping[str, Any]) -> str:
    """Return the end of a message that suggests the key of the file that may be meant; empty if there is none."""
    known = {".".join(each): each[-1] for each in _leaves(values)}
    known |= {key: key for key in (*values, *_ROPE_KEYS)}
    known.pop(".".join(path), None)
    meant = [name for name, last in known.items() if last == path[-1]]
    meant = meant or difflib.get_close_matches(".".join(path), known, n=1)
    return f"; did you mean `{meant[0]}`?" if meant and meant[0] not in path else ""
