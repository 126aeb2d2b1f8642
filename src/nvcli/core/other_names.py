"""Names in other tools, and nvcli's names for the same things: for unknown options, commands and keys.

The names are in `other_names.toml`, which is read on first use.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any


@functools.cache
def own_keys() -> dict[str, tuple[str, ...]]:
    """Return other names → keys of the configuration that they may stand for."""
    keys: dict[str, tuple[str, ...]] = {}
    for key, names in _tables()["keys"].items():
        for name in names:
            keys[name] = (*keys.get(name, ()), key)
    return keys


@functools.cache
def remarks() -> dict[str, str]:
    """Return other names → what to do instead, for names without a key."""
    return _said("remarks")


@functools.cache
def commands() -> dict[str, str]:
    """Return other tools' commands → what to do instead."""
    return _said("commands")


def _said(table: str) -> dict[str, str]:
    return {name: group["say"] for group in _tables()[table] for name in group["names"]}


@functools.cache
def _tables() -> dict[str, Any]:
    import tomllib

    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def name_of_option(option: str) -> str:
    """Spell an option like a key: `--Max-Tokens` → `max_tokens`."""
    return option.lstrip("-").lower().replace("-", "_")
