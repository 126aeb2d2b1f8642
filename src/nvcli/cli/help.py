"""How a command's help looks: its options in groups. Plain text, so that help needs no more imports than parsing."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

from nvcli.config import FLAG_KEYS, default_of

ROWS = "Rows and files"
WORKLOAD = "Requests"
MODEL = "Model and GPUs"
PROMPTS = "Prompts"
SAMPLING = "Sampling, where a row does not say it itself"
RESULT = "Result"
OTHER = "Configuration and help"
"""The groups of options. An option names its own as `rich_help_panel`; one without a group belongs to the last."""


class GroupedCommand(TyperCommand):
    """A command whose help shows each group of options under a heading of its own, in the order of declaration."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line, without the braces that typer sets around arguments."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options group by group. `ctx` and `formatter` are typer's."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                groups.setdefault("Arguments", []).append(
                    (parameter.metavar or parameter.name, record[1].partition("  [")[0])
                )
            else:
                group = getattr(parameter, "rich_help_panel", None) or OTHER
                groups.setdefault(group, []).append((record[0], _with_default(record[1], parameter.opts[0])))
        for title in sorted(groups, key=lambda title: title == OTHER):  # the help option is not declared here
            with formatter.section(title):
                formatter.write_dl(groups[title])


def _with_default(text: str, flag: str) -> str:
    """Return an option's help with its default at the end, as `[default: …]`: that of the key that the flag sets, if
    the text names none."""
    text = re.sub(r"\.?\s+\[(default: |required)", r" [\1", text)
    if flag not in FLAG_KEYS or "[default: " in text:
        return text
    value = default_of(FLAG_KEYS[flag])
    if isinstance(value, bool) or not isinstance(value, int | float | str) or value == "":
        return text
    return f"{text.removesuffix('.')} [default: {f'{value:g}' if isinstance(value, float) else value}]"
