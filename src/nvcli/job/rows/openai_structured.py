"""Reads which form an OpenAI row wants for its answer, in the spelling of the API, vLLM and SGLang.

`response_format` is the API's (platform.openai.com/docs/guides/structured-outputs); `structured_outputs` and, in older
releases, `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar` are vLLM's; `json_schema`, `regex` and
`ebnf` are SGLang's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from nvcli.core.other_names import remarks
from nvcli.core.validation import shorten, show, suggest
from nvcli.errors import RowError
from nvcli.job.rows.raw_values import decode_inner

STRUCTURED_KEYS = (
    *("response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf"),
)
"""Parameters of a body, at most one of which may be given."""


_RESPONSE_FORMAT_KEYS = ("type", "json_schema", "schema", "name", "description", "strict")


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


_FORMS: dict[str, tuple[str, Callable[[Any], bool], str]] = {
    "json": ("json_schema", lambda value: isinstance(value, dict | bool), "a JSON schema"),
    "json_object": ("json_object", lambda value: value is True, "true or false"),
    "regex": ("regex", lambda value: isinstance(value, str), "text"),
    "choice": ("choice", _are_texts, "a list of texts"),
    "grammar": ("grammar", lambda value: isinstance(value, str), "text"),
}
"""vLLM's names → the keys of `structured`, whether they may have a value, and what is allowed."""
_OF_SGLANG = {"json_schema": "json", "ebnf": "grammar"}
"""SGLang's names that differ from vLLM's."""


def unsupported_key(key: str, known: Iterable[str], where: str = "body") -> RowError:
    """Return the error of a parameter that is not known."""
    return RowError("unsupported_parameter", f"`{where}.{shorten(key)}` is not supported; {suggest(key, known)}")


def unsupported_value(key: str, value: Any) -> RowError:
    """Return the error of a parameter whose value is not supported."""
    way_out = remarks().get(key, "leave it out")
    return RowError("unsupported_parameter", f"`body.{key}` is {show(value)}, which is not supported; {way_out}")


def structured_of(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the form that a body asks for as a row's `sampling.structured`; None if it asks for none.

    `given` are the parameters of the body that are not null. Raises RowError.
    """
    asked = [key for key in STRUCTURED_KEYS if key in given and given[key] != {"type": "text"}]
    if len(asked) > 1:
        names = " and ".join(f"`body.{key}`" for key in asked)
        raise RowError("invalid_structured", f"{names} are given; give one of them")
    if not asked:
        return None
    (key,) = asked
    if key == "response_format":
        return _of_response_format(given[key])
    if key == "structured_outputs":
        return _of_structured_outputs(given[key])
    name = key.removeprefix("guided_")
    return _structured(_OF_SGLANG.get(name, name), given[key], f"body.{key}")


def _of_response_format(value: Any) -> dict[str, Any]:
    """Return the form of `response_format`, whose schema may stand beside its `type`, as in `/v1/responses` and at
    Together and llama.cpp. Raises RowError."""
    where = "body.response_format"
    if not isinstance(value, dict) or value.get("type") not in ("json_object", "json_schema"):
        raise _invalid(where, value, 'allowed: an object whose `type` is "text", "json_object" or "json_schema"')
    given: Any = {key: each for key, each in value.items() if each is not None}
    if unknown := [key for key in given if key not in _RESPONSE_FORMAT_KEYS]:
        raise unsupported_key(unknown[0], _RESPONSE_FORMAT_KEYS, where)
    if "schema" in given and "json_schema" in given:
        raise RowError("invalid_structured", f"`{where}` has `schema` and `json_schema`; give one of them")
    if "schema" not in given:
        if "json_schema" not in given and given["type"] == "json_object":
            return {"json_object": True}
        where, given = f"{where}.json_schema", given.get("json_schema")
        if not isinstance(given, dict) or given.get("schema") is None:
            raise _invalid(where, given, "expected an object with a `schema`")
    return _structured("json", given["schema"], f"{where}.schema")


def _of_structured_outputs(value: Any) -> dict[str, Any]:
    where = "body.structured_outputs"
    if not isinstance(value, dict):
        raise _invalid(where, value, "expected an object")
    given = {name: each for name, each in value.items() if each is not None and each is not False}
    for name in given:
        if name not in _FORMS:
            raise unsupported_key(name, _FORMS, where)
    if len(given) != 1:
        raise RowError("invalid_structured", f"`{where}` holds {len(given)} of {', '.join(_FORMS)}; give one of them")
    ((name, each),) = given.items()
    return _structured(name, each, f"{where}.{name}")


def _structured(name: str, value: Any, where: str) -> dict[str, Any]:
    """Return the value of one of vLLM's parameters as `structured` has it. Raises RowError."""
    if name == "json" and isinstance(value, str):
        try:
            value = decode_inner(value)
        except msgspec.DecodeError as error:
            raise RowError("invalid_structured", f"`{where}` is {show(value)}, which is not JSON: {error}") from None
    key, is_allowed, allowed = _FORMS[name]
    if not is_allowed(value):
        raise _invalid(where, value, f"allowed: {allowed}")
    return {key: value}


def _invalid(where: str, value: Any, way_out: str) -> RowError:
    return RowError("invalid_structured", f"`{where}` is {show(value)}; {way_out}")
