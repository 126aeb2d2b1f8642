"""SamplingParams: a Python program's settings for choosing tokens, checked when it is made.

Wherever an LLM takes sampling it accepts a dict, a `SamplingParams`, or an object with such attributes, such as vLLM's
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nvcli.core import sampling_params
from nvcli.core.validation import InvalidValue, convert, show, suggest
from nvcli.errors import ConfigError, RowError
from nvcli.job.rows.openai_structured import structured_of
from nvcli.job.rows.plain_values import plain_value

_KEYS = sampling_params.SamplingParams.__struct_fields__
_DEFAULTS = sampling_params.SamplingParams()
_STRUCTURED = ("structured_outputs", "guided_decoding")
"""vLLM's current and former names of `structured`."""
_SAME = {"thinking_token_budget": "thinking_budget"}
"""Other names of vLLM's → nvcli's."""
_OF_THE_ENGINE = frozenset(("output_kind", "output_text_buffer_length", "skip_clone"))
"""Attributes of vLLM's objects that do not concern the answer."""
_ELSEWHERE: dict[str, Any] = {
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "length_penalty": 1.0,
    "early_stopping": False,
    "use_beam_search": False,
    "logits_processors": None,
    "extra_args": None,
    "flat_logprobs": False,
}
"""Keys of vLLM's that nvcli does not have → values that are no-ops."""


class SamplingParams(dict[str, Any]):
    """The given keys of a row's `sampling` object: `SamplingParams(temperature=0, n=2)`.

    It is a dict, so it can be modified, pickled and put into a row. Its keys can be read and set as attributes; reading
    one that was not given returns its default.
    """

    def __init__(self, **values: Any) -> None:
        """Raises ConfigError for an unknown key or an invalid value."""
        super().__init__(_checked(_in_our_words(values, "SamplingParams"), "SamplingParams"))

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in _KEYS:
            return getattr(_DEFAULTS, name)
        raise AttributeError(f"SamplingParams has no `{name}`; {suggest(name, _KEYS)}")

    def __setattr__(self, name: str, value: Any) -> None:
        self.update(_checked({**self, name: value}, "SamplingParams"))

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{key}={value!r}' for key, value in self.items())})"


def read_sampling(given: object, name: str) -> dict[str, Any]:
    """Return the keys and values of a dict or of an object with such attributes. `name` is what messages call it.

    All values of an object count, including its defaults; None stands for a default. Raises ConfigError.
    """
    if given is None:
        return {}
    values = given if isinstance(given, Mapping) else _in_our_words(_attributes(given, name), name)
    return _checked(values, name)


def read_samplings(sampling_params: object, sampling: object) -> dict[str, Any] | list[dict[str, Any]]:
    """Return the sampling of all rows, or a list with that of each, given under either name. Raises ConfigError."""
    if sampling_params is not None and sampling is not None:
        raise ConfigError("`sampling_params` and `sampling` mean the same, and both are given; leave one out")
    given, name = (sampling, "sampling") if sampling_params is None else (sampling_params, "sampling_params")
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return read_sampling(given, name)
    read: dict[int, dict[str, Any]] = {}  # one object may stand for many rows
    for number, each in enumerate(given):
        if id(each) not in read:
            read[id(each)] = read_sampling(each, f"{name}[{number}]")
    return [read[id(each)] for each in given]


def _attributes(given: object, name: str) -> dict[str, Any]:
    """Return the public attributes of an object that have an effect."""
    kind = type(given)
    declared: Iterable[str] = (
        getattr(kind, "__struct_fields__", ())
        or getattr(kind, "__dataclass_fields__", ())
        or getattr(given, "__dict__", ())
    )
    names = [each for each in declared if not each.startswith("_")]
    names += [key for key in _KEYS if key not in names and hasattr(given, key)]
    if not {*_KEYS, *_STRUCTURED}.intersection(names):
        raise ConfigError(
            f'{name} is {show(given)}; give a dict such as {{"temperature": 0}}, or an object with such attributes'
        )
    values = {each: getattr(given, each) for each in names if each not in _OF_THE_ENGINE}
    known = {*_KEYS, *_STRUCTURED, *_SAME}
    return {key: value for key, value in values.items() if key in known or not _is_empty(value)}


def _in_our_words(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Translate values to nvcli's keys, without no-ops. Raises ConfigError."""
    ours: dict[str, Any] = {}
    for key, value in values.items():
        if key in _STRUCTURED:
            if value is not None:
                ours["structured"] = _structured(value, f"{name}.{key}")
        elif key in _KEYS:
            if value is not None or getattr(_DEFAULTS, key) is None:
                ours[key] = value
        elif key in _SAME:
            if value is not None:
                ours[_SAME[key]] = value
        elif key not in _ELSEWHERE or not (_is_empty(value) or value == _ELSEWHERE[key]):
            ours[key] = value
    return ours


def _is_empty(value: object) -> bool:
    return isinstance(value, bool | int | float | str | list | dict | tuple | None) and not value


def _structured(value: Any, name: str) -> dict[str, Any]:
    """Translate vLLM's object for structured answers to nvcli's `structured`."""
    if not isinstance(value, Mapping):
        value = {form: getattr(value, form, None) for form in ("json", "regex", "choice", "grammar", "json_object")}
    try:
        structured = structured_of({"structured_outputs": plain_value(value, name)})
    except RowError as error:
        raise ConfigError(error.message.replace("body.structured_outputs", name)) from None
    assert structured is not None
    return structured


def _checked(values: Mapping[Any, Any], name: str) -> dict[str, Any]:
    """Return values as plain data that is valid as sampling. Raises ConfigError."""
    try:
        for key in values:
            if key not in _KEYS:
                convert({key: None}, sampling_params.SamplingParams, under=(name,))  # raises
        plain: dict[str, Any] = plain_value(dict(values), name)
        convert(plain, sampling_params.SamplingParams, under=(name,))
    except (RowError, InvalidValue) as error:
        raise ConfigError(error.message) from None
    return plain
