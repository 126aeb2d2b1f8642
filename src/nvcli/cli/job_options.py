"""The options of `generate` that set keys of the configuration, for other commands that read the same rows.

A command that is made with `with_job_options` has all of them, with the same names, help and completion, without saying
them again: what `generate` learns, it knows too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from nvcli.cli.generate import generate
from nvcli.cli.key_flags import key_flags, key_parameters


def with_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command that takes their values as `**options`, by the names of the parameters."""
    own = inspect.signature(command, eval_str=True)
    parameters = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters += [one for name, one in key_parameters(generate).items() if name not in own.parameters]
    parameters.sort(key=lambda one: one.default is not inspect.Parameter.empty)
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
    command.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": None}
    return command


def job_flags(options: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the options by flag, as `config.load_sourced_config` takes them. Raises ConfigError."""
    return key_flags(generate, options)
