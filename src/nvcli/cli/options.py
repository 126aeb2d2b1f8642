"""Options, generated from what they set: keys of the configuration, fields of structs, parameters of a command.

Each is declared once, with its `Flag`, for all commands. Values are parsed here or by the configuration and
not by typer, so that errors read like those of the configuration.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import typer
from msgspec import Meta
from msgspec.inspect import type_info
from typer.core import TyperCommand

from nvcli.cli import completion
from nvcli.cli.messages import choose_config_file
from nvcli.core.config import RunConfig, key_fields, load_sourced_config
from nvcli.core.flags import GROUPS, OTHER, RESULT, ROWS, Flag, FlaggedField, flag_of, flagged_fields
from nvcli.core.system.process_limits import check_process
from nvcli.core.task_config import Task
from nvcli.core.validation import InvalidValue, convert, describe
from nvcli.errors import ConfigError

if TYPE_CHECKING:
    from nvcli.core.config_source import ConfigSource

INPUT = typer.Argument(metavar="INPUT", help="Files, folders, datasets or URLs; - is standard input.")

Limit = Annotated[Annotated[int, Meta(ge=1)] | None, Flag("--limit", ROWS, "Only the first N rows.")]
ShardName = Annotated[
    str | None,
    Flag(
        "--shard",
        ROWS,
        "Only every N-th row, starting at row I (0 to N-1); `nvcli merge` joins the outputs.",
        "I/N|auto",
    ),
]
Overwrite = Annotated[bool, Flag("--overwrite", ROWS, "Start over instead of continuing an existing output.")]
AsJson = Annotated[bool, Flag("--json", RESULT, "Print the result as JSON.")]


class Settings(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The configuration part of a command line."""

    config: Annotated[
        Path | None,
        Flag("--config -c", OTHER, "YAML file, or `none` [default: ./nvcli.yaml, if there is one]"),
    ] = None
    overrides: Annotated[
        list[str], Flag("--set", OTHER, "Any key of the configuration; may be repeated.", "KEY=VALUE", completes="keys")
    ] = []
    flags: dict[str, Any] = {}
    """Flag → value, for the options of keys that were given."""

    @functools.cached_property
    def file(self) -> Path | None:
        """The configuration file to read."""
        return choose_config_file(self.config)

    def load(self, *, shape: str | None = None, needs_model: bool = True) -> RunConfig:
        """Load the configuration, as `load_sourced` does."""
        return self.load_sourced(shape=shape, needs_model=needs_model)[0]

    def load_sourced(
        self, *, task: Task | None = None, shape: str | None = None, needs_model: bool = True
    ) -> tuple[RunConfig, ConfigSource]:
        """Load the configuration with the origin of each key. Raises ConfigError.

        `task` overrides its own, and a known shape replaces its model. Without `needs_model` it may have none.
        """
        flags = dict(self.flags)
        if shape is not None and "--model" in flags:
            raise ConfigError(
                f"--shape {shape} and --model {flags['--model']} exclude each other: --shape makes up weights, --model "
                "reads them; leave one out"
            )
        if shape is not None:
            flags["--model"] = shape
        settings = None if task is None else {"task": task}
        check_process()
        run, source = load_sourced_config(self.file, self.overrides, flags, settings=settings, needs_model=needs_model)
        if shape is not None and run.lora is not None:
            raise ConfigError(
                f"--shape {shape} makes up weights, and `lora` is {run.lora}, an adapter of others; leave one out"
            )
        return run, source


def keys_of(*sections: str, without: Collection[str] = ()) -> list[str]:
    """Return the keys that have a flag, of these sections of the configuration; "" is the top level."""
    return [key for key in key_fields() if key.rpartition(".")[0] in sections and key not in without]


def with_options(*keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command with its options.

    A parameter with a `Flag` becomes an option, and a struct an option for each field that has one. `Settings` have
    those for `keys` of the configuration too. All other parameters are as typer wants them.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        parameters: list[inspect.Parameter] = []
        options: list[FlaggedField] = []
        readers: dict[str, Callable[[Mapping[str, Any]], Any]] = {}
        for name, parameter in inspect.signature(command).parameters.items():
            kind = hints[name]
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                fields = flagged_fields(kind)
                of_keys = [key_fields()[key] for key in keys] if kind is Settings else []
                options += [*of_keys, *fields.values()]
                readers[name] = functools.partial(_read_struct, kind, fields, of_keys)
            elif (flag := flag_of(kind)) is not None:
                field = FlaggedField(flag, kind, parameter.default)
                options.append(field)
                readers[name] = functools.partial(_read, field)
            else:
                parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=kind))
                readers[name] = itemgetter(name)
        options.sort(key=lambda option: GROUPS.index(option.flag.group))
        parameters += map(_typer_option, options)

        @functools.wraps(command)
        def run(**given: Any) -> None:
            command(**{name: read(given) for name, read in readers.items()})

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def _typer_option(field: FlaggedField) -> inspect.Parameter:
    """Return the parameter from which typer makes the option: a switch, a text, or texts."""
    flag, kinds = field.flag, _kinds(field.kind)
    default: Any = ... if field.default is inspect.Parameter.empty else None
    kind: Any = str | None
    if flag.switch is not None:
        kind = bool | None
    elif bool in kinds:
        kind, default = bool, False
    elif any(get_origin(each) in (list, Sequence) for each in kinds):
        kind = list[str] | None
    words = [word for each in kinds if get_origin(each) is Literal for word in get_args(each)]
    complete = getattr(completion, flag.completes) if flag.completes else completion.words(*words) if words else None
    option = typer.Option(
        default,
        *flag.names.split(),
        metavar=flag.metavar or _metavar(kinds),
        help=_help(field),
        autocompletion=complete,
        rich_help_panel=flag.group,
        show_default=False,
    )
    return inspect.Parameter(_name(flag), inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE", dict[str, Any]: "JSON"}
"""Type → placeholder for values in the help."""


def _metavar(kinds: list[Any]) -> str | None:
    """Return the placeholder in the help for a value of these types; None for a switch."""
    words = [get_args(kind) if get_origin(kind) is Literal else (_METAVARS.get(kind),) for kind in kinds]
    return "|".join(word for each in words for word in each if word) or None


def _help(field: FlaggedField) -> str:
    """Return an option's help, with its default at the end."""
    text, default = field.flag.help, field.default
    if field.flag.example is not None:
        return f"{text}, such as '{field.flag.example}'."
    if "[default: " in text or isinstance(default, bool) or not isinstance(default, int | float | str | Path):
        return text
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    return f"{text.removesuffix('.')} [default: {shown}]" if shown else text


def _name(flag: Flag) -> str:
    """Return the name of an option's parameter."""
    return flag.name.lstrip("-").replace("-", "_")


def _kinds(kind: Any) -> list[Any]:
    """Return the members of a union, without annotations."""
    if get_origin(kind) is Annotated:
        return _kinds(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [part for each in get_args(kind) for part in _kinds(each)]
    return [kind]


def _read_struct(
    kind: type[msgspec.Struct],
    fields: Mapping[str, FlaggedField],
    of_keys: Collection[FlaggedField],
    given: Mapping[str, Any],
) -> msgspec.Struct:
    """Return a struct with the values of its options. Values of keys are checked by the configuration."""
    values = {name: _read(field, given) for name, field in fields.items()}
    if of_keys:
        values["flags"] = {}
    for field in of_keys:
        flag, value = field.flag, given[_name(field.flag)]
        if flag.switch is not None and value is not None:
            off = flag.names.partition("/")[2]
            values["flags"] |= {flag.name: flag.switch[0]} if value else {off: flag.switch[1]}
        elif isinstance(value, str):
            values["flags"][flag.name] = _plain(field, value)
        elif value:  # a switch that is off and an empty list were not given
            values["flags"][flag.name] = value
    return kind(**values)


def _read(field: FlaggedField, given: Mapping[str, Any]) -> Any:
    """Parse the value of an option that is not a key; ~ begins the path of a file in the home folder. Raises
    ConfigError that says what is allowed."""
    value = given[_name(field.flag)]
    if value is None:
        return field.default
    is_path = Path in _kinds(field.kind)
    if isinstance(value, str) and (is_path or field.flag.metavar == _METAVARS[Path]):
        value = os.path.expanduser(value)
    if not isinstance(value, str) or is_path:
        return Path(value) if isinstance(value, str) else value
    try:
        return convert(_plain(field, value), field.kind)
    except (InvalidValue, UnicodeEncodeError):
        allowed = describe(type_info(field.kind)).removesuffix(" or null")
        raise ConfigError(f"{field.flag.name} {value}: allowed: {allowed}") from None


def _plain(field: FlaggedField, text: str) -> Any:
    """Return a JSON object, a number or null if numbers are allowed, or else the text."""
    if field.flag.example is not None:
        from nvcli.core.config_source import json_object

        return json_object(field.flag.name, text, example=field.flag.example)
    kinds = _kinds(field.kind)
    if {int, float}.isdisjoint(kinds):
        return text
    if text == "null" and NoneType in kinds and str not in kinds:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class GroupedCommand(TyperCommand):
    """A command whose help lists each group of options under a heading, as plain text."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line, without typer's braces around arguments."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options group by group. `ctx` and `formatter` are typer's."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                names, text = parameter.metavar or str(parameter.name), record[1].partition("  [")[0]
                groups.setdefault("Arguments", []).append((names, text))
            else:
                group = getattr(parameter, "rich_help_panel", None) or OTHER
                groups.setdefault(group, []).append((record[0], re.sub(r"\.?\s+\[required", " [required", record[1])))
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)
