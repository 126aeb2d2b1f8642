"""Formats findings as text (coloured and wrapped on a terminal, plain in a pipe) and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TextIO

import msgspec

from nvcli.core.byte_sizes import counted
from nvcli.tools.doctor.findings import Finding, Level, Section, count

_NAME_WIDTH = 18
_COLOURS = {Level.OK: "green", Level.NOTE: "dim", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def format_json(sections: Sequence[Section]) -> str:
    """Return the findings as one line of ASCII JSON.

    The form is `{"fit": …, "findings": [{"section", "name", "level", "found", "advice"}]}`.
    """
    findings = [{"section": s.title, **msgspec.to_builtins(f)} for s in sections for f in s.findings]
    fit = count(sections, Level.PROBLEM) == 0
    return json.dumps({"fit": fit, "findings": findings})


def format_verdict(sections: Sequence[Section]) -> str:
    """Return the report's last line."""
    problems, warnings = (count(sections, level) for level in (Level.PROBLEM, Level.WARNING))
    counts = f"{counted(problems, 'problem')}, {counted(warnings, 'warning')}"
    return f"{counts}: {'a run would stop' if problems else 'nothing here would stop a run'}"


def print_section(section: Section, stream: TextIO) -> None:
    """Print a line for each finding, and one for what to do about it."""
    if stream.isatty():
        _print_rich(section, stream)
    else:
        stream.write("\n".join([section.title, *map(_plain, section.findings)]) + "\n")
        stream.flush()


def _plain(finding: Finding) -> str:
    line = f"  {finding.level.value:<8} {finding.name:<{_NAME_WIDTH}} {finding.found}".rstrip()
    return f"{line}\n{'':<{_NAME_WIDTH + 12}}→ {finding.advice}" if finding.advice else line


def _print_rich(section: Section, stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column(width=8)
    table.add_column(width=_NAME_WIDTH)
    table.add_column(overflow="fold")
    for finding in section.findings:
        told = Text(finding.found)
        if finding.advice:
            told.append(f"\n→ {finding.advice}", style="bold")
        table.add_row(Text(finding.level.value, style=_COLOURS[finding.level]), finding.name, told)
    console = Console(file=stream, highlight=False, markup=False)
    console.print(Text(section.title, style="bold"))
    console.print(table)
