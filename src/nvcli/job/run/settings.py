"""The settings of a run, each with its value and origin, for summaries and reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from nvcli.core.config import JobConfig, RunConfig
from nvcli.core.sampling_params import SamplingParams, lay_over
from nvcli.core.validation import Path
from nvcli.models.generation_config import GENERATION_CONFIG_FILE

SetterOf = Callable[[Path], str | None]
"""Names the file and line, or the flag, that set the key at a path; None for a default (`ConfigSource.setter`)."""

DEFAULT = "default"
"""Origin of a built-in value."""
CONFIGURATION = "configuration"
"""Origin of a value that was set in an unknown way."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One key of the configuration."""

    key: str
    """The key as `--set` takes it, such as `sampling.temperature`."""
    value: Any
    origin: str
    """The source of the value: a file and line, a flag, `generation_config.json` or `default`."""


def is_worth_showing(setting: Setting) -> bool:
    """Tell whether to show a sampling parameter: it was set, or people often ask for it."""
    return setting.origin != DEFAULT or setting.key in ("sampling.temperature", "sampling.max_tokens")


def sampling_name(setting: Setting) -> str:
    """Return the name of a sampling parameter as a row's `sampling` has it, such as `temperature`."""
    return setting.key.removeprefix("sampling.")


def unknown_setter(path: Path) -> str | None:
    """Serve as `SetterOf` where it is unknown what set the keys."""
    return None


def sampling_settings(
    run: RunConfig, generation_defaults: Mapping[str, Any], setter_of: SetterOf = unknown_setter
) -> list[Setting]:
    """Return the sampling of a row without its own, parameter by parameter.

    `generation_defaults` are those of the checkpoint's generation_config.json.
    """
    own = generation_defaults if run.generation_config == "auto" else {}
    values = lay_over(own, run.sampling)
    settings = []
    for key, default in msgspec.to_builtins(msgspec.structs.asdict(SamplingParams())).items():
        value, origin = values.get(key, default), DEFAULT
        if key in run.sampling:
            origin = setter_of(("sampling", key)) or CONFIGURATION
        elif key in own and value == own[key]:
            origin = GENERATION_CONFIG_FILE
        elif key in own:  # the checkpoint's `min_tokens`, which gave way
            origin = setter_of(("sampling", "max_tokens")) or CONFIGURATION
        settings.append(Setting(key=f"sampling.{key}", value=value, origin=origin))
    return settings


def config_settings(run: RunConfig, setter_of: SetterOf = unknown_setter) -> list[Setting]:
    """Return every key of a configuration but those of `sampling`, in the order in which they are declared."""
    paths: list[tuple[str, ...]] = [(key,) for key in RunConfig.__struct_fields__ if key not in ("job", "sampling")]
    paths += [("job", key) for key in JobConfig.__struct_fields__]
    settings = []
    for path in paths:
        section: Any = run.job if len(path) == 2 else run
        value = msgspec.to_builtins(getattr(section, path[-1]), str_keys=True)
        default = msgspec.to_builtins(getattr(type(section)(), path[-1]), str_keys=True)
        origin = setter_of(path) or (DEFAULT if value == default else CONFIGURATION)
        settings.append(Setting(key=".".join(path), value=value, origin=origin))
    return settings
