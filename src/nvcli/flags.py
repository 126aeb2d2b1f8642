"""Flag: the option of the command line that sets a field, said beside the field itself.

A field with a flag is annotated so: `seed: Annotated[int, Flag("--seed", SAMPLING, "Seed of the run.")] = 0`.
Commands make their options of such fields (`cli.options`): those of the configuration, and structs of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

ROWS = "Rows and files"
PROMPTS = "Prompts"
WORKLOAD = "Requests"
MODEL = "Model and GPUs"
SAMPLING = "Sampling, where a row does not say it itself"
RESULT = "Result"
OTHER = "Configuration and help"
GROUPS = (ROWS, PROMPTS, WORKLOAD, MODEL, SAMPLING, RESULT, OTHER)
"""The groups of options in a command's help, in their order there."""


@dataclass(frozen=True, slots=True)
class Flag:
    """An option: its names, and what the help says of it.

    A field of the type `bool` is a switch, and one that holds a list may be repeated. The help shows the default of the
    field, unless the text names another as `[default: …]`.
    """

    names: str
    """The name, with a short one behind it (`--model -m`) or one for off (`--chat/--no-chat`)."""
    group: str
    """The group of options, one of `GROUPS`."""
    help: str
    metavar: str | None = None
    """The value in the help; None: as the type of the field says, such as `N|auto`."""
    example: str | None = None
    """A JSON object; the value is one, and the help names this."""
    switch: tuple[str, str] | None = None
    """The values for on and off, where the field is no `bool`."""
    completes: Literal["models", "shapes", "gpus", "keys"] | None = None
    """The values that the shell offers (`cli.completion`); None: the words that the field takes."""

    @property
    def name(self) -> str:
        """The name that messages use."""
        return self.names.partition(" ")[0].partition("/")[0]


@dataclass(frozen=True, slots=True)
class FlaggedField:
    """A field that an option sets."""

    flag: Flag
    kind: Any
    """The type of its values, with their limits."""
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
