"""Hints for a command line that cannot be parsed: nvcli's name for an option or a command of another tool."""

from __future__ import annotations

import re

import typer

from nvcli.core.config import all_keys, flag_keys
from nvcli.core.other_names import commands, name_of_option, own_keys, remarks

_MARKS = {"sampling": "--max-tokens", "job": "--system", "score": "--normalize", "embed": "--pooling"}
"""Section → an option that only commands which read this section have."""
_UNKNOWN_COMMAND = re.compile(r"No such command '(.*?)'", re.DOTALL)


def usage_message(error: typer.TyperException) -> str:
    """Return typer's message, with what to type instead of another tool's option or command."""
    option: str | None = getattr(error, "option_name", None)
    context: typer.Context | None = getattr(error, "ctx", None)
    command = _UNKNOWN_COMMAND.match(error.message)
    hint = None
    if command is not None:
        hint = commands().get(command[1].lower().replace("_", "-"))
    elif option is not None and error.message.startswith("No such option") and context is not None:
        hint = _option_hint(option, {name for parameter in context.command.params for name in parameter.opts})
    shown = command[0] if command is not None else error.message
    return f"{shown}; {hint}" if hint else error.format_message().rstrip(".")


def _option_hint(option: str, options: set[str]) -> str | None:
    """Suggest an unknown option's name in a command with these options; None: no suggestion."""
    name = name_of_option(option)
    meant = [shown for key in _keys(name) if (shown := _spelled(key, options))]
    if meant:
        return f"nvcli calls it {' or '.join(meant)}"
    unread = next((key for key in _keys(name) if _MARKS.get(key.partition(".")[0]) not in (None, *options)), None)
    return remarks().get(name) if unread is None else f"it is about `{unread}`, which has no effect here; leave it out"


def _keys(name: str) -> tuple[str, ...]:
    """Return the keys that an option's name may stand for."""
    if name in own_keys():
        return own_keys()[name]
    return tuple(key for key in all_keys() if name in (key, key.rpartition(".")[2]))[:1]


def _spelled(key: str, options: set[str]) -> str | None:
    """Return how a command with these options sets a key: by a flag, or by `--set`; None if it cannot."""
    flag = next((flag for flag, own in flag_keys().items() if own == key), None)
    if flag in options:
        return flag
    is_read = _MARKS.get(key.partition(".")[0]) in (None, *options)
    return f"--set {key}=…" if is_read and "--set" in options else None
