"""Names that other tools use, and what nvcli calls the same: for options, commands and keys that nvcli does not know.

The names are in `other_names.toml`, which is read when one is asked for.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any


@functools.cache
def own_keys() -> dict[str, tuple[str, ...]]:
    """Return the keys of the configuration that each name may stand for."""
    keys: dict[str, tuple[str, ...]] = {}
    for key, names in _tables()["keys"].items():
        for name in names:
            keys[name] = (*keys.get(name, ()), key)
    return keys


@functools.cache
def remarks() -> dict[str, str]:
    """Return what to do instead, by name, where there is no key."""
    return _said("remarks")


@functools.cache
def commands() -> dict[str, str]:
    """Return what to do instead, by command."""
    return _said("commands")


def _said(table: str) -> dict[str, str]:
    return {name: group["say"] for group in _tables()[table] for name in group["names"]}


@functools.cache
def _tables() -> dict[str, Any]:
    import tomllib

    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def name_of_option(option: str) -> str:
    """Return an option as a key is spelled: `--Max-Tokens` → `max_tokens`."""
    return option.lstrip("-").lower().replace("-", "_")
