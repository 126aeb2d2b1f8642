"""Options that set keys of the configuration (`FLAG_KEYS`): which ones a command has, and their values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, get_args, get_origin

from nvcli.cli.values import plain_value
from nvcli.config import FLAG_KEYS

_TEXTS = frozenset(
    (
        *("--model", "--revision", "--dtype", "--quantization", "--device", "--order"),
        *("--system", "--prompt-template", "--chat-template"),
        *("--prompt-field", "--messages-field", "--id-field", "--text-field"),
    )
)
"""Flags whose values stay texts, whatever they spell."""
_OBJECTS = {
    "--chat-template-kwargs": '{"enable_thinking": false}',
    "--hf-overrides": '{"max_position_embeddings": 131072}',
}
"""Flags whose values are JSON objects, with an example of each."""

_SWITCHES = {"--chat": {"--chat": (True, "always"), "--no-chat": (False, "never")}}
"""Switches with a word for on and one for off, each with the name that stands for it."""


def key_flags(
    command: Callable[..., None], values: Mapping[str, Any], *, leave_out: Collection[str] = ()
) -> dict[str, Any]:
    """Return the values of a command's options that set keys, by flag, as `config.load_sourced_config` takes them.

    `values` are those of the command's parameters by name, and may hold others. `leave_out` are flags that mean
    something else to the command. Raises ConfigError.
    """
    from nvcli.config_source import json_object

    flags: dict[str, Any] = {}
    for name, parameter in key_parameters(command).items():
        flag, value = flag_of(parameter), values.get(name)
        if flag in leave_out:
            continue
        if flag in _SWITCHES:
            flags |= {each: word if value is is_on else None for each, (is_on, word) in _SWITCHES[flag].items()}
        elif flag in _OBJECTS:
            flags[flag] = json_object(flag, value, example=_OBJECTS[flag])
        elif isinstance(value, str):
            flags[flag] = value if flag in _TEXTS else plain_value(value)
        else:  # a switch that is off and an empty list were not given
            flags[flag] = value or None
    return flags


def key_parameters(command: Callable[..., None]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a command whose option sets a key, by name."""
    parameters = inspect.signature(command, eval_str=True).parameters
    return {name: parameter for name, parameter in parameters.items() if flag_of(parameter) in FLAG_KEYS}


def flag_of(parameter: inspect.Parameter) -> str:
    """Return the first name of a parameter's option; empty where it has none."""
    if get_origin(parameter.annotation) is not Annotated:
        return ""
    names = str(getattr(get_args(parameter.annotation)[1], "default", ""))  # typer keeps the first name there
    return names.partition("/")[0]
