"""Random JSON schemas whose answers are short: every text has a longest length and every list a most items."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

_WORDS = ("name", "size", "colour", "größe", "a b", "x-1", "ref", "kind", "count", "list", 'quo"te')
_PATTERNS = ("^[a-z]{1,6}$", "^[0-9]{2,4}-[A-F]{2}$", "^(yes|no|maybe)$", "^v[0-9]{1,3}\\.[0-9]$")
_FORMATS = ("date", "uuid", "ipv4")


def make_schemas(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Make so many different schemas. All of an answer is required, nested up to three levels deep."""
    rng = random.Random(seed)
    made: dict[str, dict[str, Any]] = {}
    while len(made) < count:
        schema = _referring(rng) if rng.random() < 0.2 else _object(rng, 2)
        made.setdefault(repr(schema), schema)
    return list(made.values())


def make_endless_schemas(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Make so many different schemas of lists that have more items than any answer has tokens."""
    endless = []
    for schema in make_schemas(count, seed=seed):
        item = {key: value for key, value in schema.items() if key != "$defs"}
        endless.append({"$defs": schema.get("$defs", {}), "type": "array", "items": item, "minItems": 100_000})
    return endless


def _any(rng: random.Random, levels: int) -> dict[str, Any]:
    kinds: list[Callable[[random.Random, int], dict[str, Any]]] = [_text, _integer, _number, _enum, _simple, _pattern]
    if levels > 0:
        kinds += [_object, _list, _tuple, _union]
    return rng.choice(kinds)(rng, levels - 1)


def _object(rng: random.Random, levels: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 3))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(rng, levels) for name in names},
        "required": names if rng.random() < 0.7 else names[: len(names) // 2],
        "additionalProperties": False,
    }
    if rng.random() < 0.3:
        schema["description"] = "an object"
    return schema


def _list(rng: random.Random, levels: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, levels), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _tuple(rng: random.Random, levels: int) -> dict[str, Any]:
    parts = [_any(rng, levels) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _union(rng: random.Random, levels: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, levels) for _ in range(rng.randint(2, 3))]}


def _text(rng: random.Random, levels: int) -> dict[str, Any]:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def _pattern(rng: random.Random, levels: int) -> dict[str, Any]:
    if rng.random() < 0.5:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    return {"type": "string", "pattern": rng.choice(_PATTERNS)}


def _integer(rng: random.Random, levels: int) -> dict[str, Any]:
    least = rng.randint(-500, 500)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 5000)}


def _number(rng: random.Random, levels: int) -> dict[str, Any]:
    return {"enum": [rng.randint(0, 9), rng.randint(0, 999) / 100, -1.5]}


def _enum(rng: random.Random, levels: int) -> dict[str, Any]:
    values = rng.sample(("red", "green", "blue", 'a "b"', "ü\n", 7, -2, None, True, [1, 2], {"k": "v"}), 4)
    return rng.choice(({"enum": values}, {"const": values[0]}))


def _simple(rng: random.Random, levels: int) -> dict[str, Any]:
    return {"type": rng.choice(("boolean", "null", ["boolean", "null"]))}


def _referring(rng: random.Random) -> dict[str, Any]:
    """Make a schema with definitions, one of which may hold itself once more."""
    leaf = _object(rng, 1)
    node = {
        "type": "object",
        "properties": {
            "leaf": {"$ref": "#/$defs/leaf"},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]},
        },
        "required": ["leaf", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"leaf": leaf, "node": node}, "$ref": "#/$defs/node"}
