"""The options of `generate` that set keys of the configuration, for other commands that read the same rows.

A command that is made with `with_job_options` has all of them, with the same names, help and completion, without saying
them again: what `generate` learns, it knows too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

from nvcli.cli.generate import generate
from nvcli.cli.options import flag_values
from nvcli.config import FLAG_KEYS

_FIELDS = ("--prompt-field", "--messages-field", "--id-field", "--text-field")
_TEXTS = frozenset((*_FIELDS, "--system", "--prompt-template", "--chat-template"))
"""Flags whose values stay texts, whatever they spell."""
_OBJECTS = frozenset(("--chat-template-kwargs",))
"""Flags whose values are JSON objects."""


def with_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command that takes their values as `**options`, by the names of the parameters."""
    own = inspect.signature(command, eval_str=True)
    parameters = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters += [one for name, one in _job_parameters().items() if name not in own.parameters]
    parameters.sort(key=lambda one: one.default is not inspect.Parameter.empty)
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
    command.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": None}
    return command


def job_flags(options: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the options by flag, as `config.load_sourced_config` takes them. Raises ConfigError."""
    from nvcli.config_source import json_object

    flags: dict[str, Any] = {}
    for name, parameter in _job_parameters().items():
        flag, value = flag_of(parameter), options.get(name)
        if flag in _OBJECTS:
            flags[flag] = json_object(flag, value)
        elif isinstance(value, str) and flag not in _TEXTS:
            flags |= flag_values({flag: value})
        else:  # a switch that is off and an empty list were not given
            flags[flag] = value if isinstance(value, str) else value or None
    return flags


def _job_parameters() -> dict[str, inspect.Parameter]:
    """Return the parameters of `generate` whose option sets a key, by name."""
    parameters = inspect.signature(generate, eval_str=True).parameters
    return {name: parameter for name, parameter in parameters.items() if flag_of(parameter) in FLAG_KEYS}


def flag_of(parameter: inspect.Parameter) -> str:
    """Return the first name of a parameter's option; empty where it has none."""
    if get_origin(parameter.annotation) is not Annotated:
        return ""
    return str(getattr(get_args(parameter.annotation)[1], "default", ""))  # typer keeps the first name there
