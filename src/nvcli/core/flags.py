"""Flag: the command-line option that sets a field, declared with the field itself.

A field with a flag is annotated like this: `seed: Annotated[int, Flag("--seed", SAMPLING, "Seed of the run.")] = 0`.
Commands make their options from such fields (`cli.options`), of the configuration and of structs of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

ROWS = "Rows and files"
PROMPTS = "Prompts"
WORKLOAD = "Requests"
MODEL = "Model and GPUs"
SAMPLING = "Sampling, for rows that do not set it themselves"
RESULT = "Result"
OTHER = "Configuration and help"
GROUPS = (ROWS, PROMPTS, WORKLOAD, MODEL, SAMPLING, RESULT, OTHER)
"""Groups of options in a command's help, in this order."""


@dataclass(frozen=True, slots=True)
class Flag:
    """An option: its names, and its help.

    A `bool` field is a switch, and the option of a list may be repeated. The help shows the default of the
    field, unless the text names another as `[default: …]`.
    """

    names: str
    """Name of the option, followed by a short one (`--model -m`) or one for off (`--chat/--no-chat`)."""
    group: str
    """Group of options, one of `GROUPS`."""
    help: str
    metavar: str | None = None
    """Placeholder of the value in the help; None: made from the field's type, such as `N|auto`."""
    example: str | None = None
    """Example of a JSON object, shown in the help of an option that takes one."""
    switch: tuple[str, str] | None = None
    """Values for on and off, if the field is not a `bool`."""
    completes: Literal["models", "shapes", "gpus", "keys"] | None = None
    """Values that the shell completes (`cli.completion`); None: those of the field's type."""

    @property
    def name(self) -> str:
        """Name used in messages."""
        return self.names.partition(" ")[0].partition("/")[0]


@dataclass(frozen=True, slots=True)
class FlaggedField:
    """A field that an option sets."""

    flag: Flag
    kind: Any
    """Type of its values, with their limits."""
    default: Any


def flag_of(kind: Any) -> Flag | None:
    """Return the flag in a type such as `Annotated[int, Flag(…)]`; None: there is none."""
    marks = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, Flag)), None)


def flagged_fields(kind: type[msgspec.Struct]) -> dict[str, FlaggedField]:
    """Return the fields of a struct that have flags, by name. Every field has a default."""
    defaults = kind()
    hints = get_type_hints(kind, include_extras=True)
    flags = {name: flag_of(hints[name]) for name in kind.__struct_fields__}
    return {
        name: FlaggedField(flag, hints[name], getattr(defaults, name))
        for name, flag in flags.items()
        if flag is not None
    }
