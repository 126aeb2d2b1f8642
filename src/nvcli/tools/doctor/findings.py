"""Findings: the results of checks, which never raise for what they find."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    NOTE = "note"
    """The finding is neither good nor bad, or nothing was checked."""
    WARNING = "warning"
    """A run works, but slower or with less room than it could."""
    PROBLEM = "problem"
    """A run would not start, or would fail."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    name: str
    level: Level
    found: str
    advice: str = ""
    """Advice on what to do; every warning and problem has some."""

    def __post_init__(self) -> None:
        assert self.advice or self.level in (Level.OK, Level.NOTE), f"{self.name}: no advice"


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """The findings about one subject."""

    title: str
    findings: list[Finding]


def ok(name: str, found: str) -> Finding:
    return Finding(name=name, level=Level.OK, found=found)


def note(name: str, found: str) -> Finding:
    return Finding(name=name, level=Level.NOTE, found=found)


def warning(name: str, found: str, advice: str) -> Finding:
    return Finding(name=name, level=Level.WARNING, found=found, advice=advice)


def problem(name: str, found: str, advice: str) -> Finding:
    return Finding(name=name, level=Level.PROBLEM, found=found, advice=advice)


def count(sections: Sequence[Section], level: Level) -> int:
    """Count the findings of one level."""
    return sum(finding.level == level for section in sections for finding in section.findings)


def format_gib(num_bytes: float) -> str:
    """Format a size such as `79.2 GiB`, or in MiB below one GiB."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"
