"""The report: the same lines on a terminal and in a pipe, and as JSON."""

from __future__ import annotations

import io
import json

import pytest

from nvcli.tools.doctor.findings import Level, Section, note, ok, problem, warning
from nvcli.tools.doctor.report import format_json, format_verdict, print_section

SECTION = Section(
    title="Things",
    findings=[
        ok("one", "fine [bold]"),
        note("two", "so so"),
        warning("three", "slow", "turn"),
        problem("four", "x", "y"),
    ],
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain() -> None:
    stream = io.StringIO()
    print_section(SECTION, stream)
    assert stream.getvalue().splitlines() == [
        "Things",
        "  ok       one                fine [bold]",
        "  note     two                so so",
        "  warning  three              slow",
        "                              → turn",
        "  problem  four               x",
        "                              → y",
    ]


def test_a_terminal_gets_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    print_section(SECTION, stream)
    text = stream.getvalue()
    assert "\x1b[" in text
    for word in ("fine [bold]", "so so", "slow", "→ turn", "→ y"):
        assert word in text


def test_json() -> None:
    result = json.loads(format_json([SECTION]))
    assert result["fit"] is False
    assert result["findings"][2] == {
        "section": "Things",
        "name": "three",
        "level": "warning",
        "found": "slow",
        "advice": "turn",
    }


def test_json_of_a_name_that_is_no_utf_8() -> None:
    text = format_json([Section(title="Folders", findings=[ok("output", "/tmp/\udcfcber, ü")])])
    assert text.isascii()
    assert json.loads(text)["findings"][0]["found"].endswith("ber, ü")


def test_verdict() -> None:
    assert format_verdict([SECTION]) == "1 problem, 1 warning: a run would stop"
    assert format_verdict([]) == "0 problems, 0 warnings: nothing here would stop a run"


@pytest.mark.parametrize("level", [Level.WARNING, Level.PROBLEM])
def test_nothing_bad_is_said_without_advice(level: Level) -> None:
    with pytest.raises(AssertionError):
        {Level.WARNING: warning, Level.PROBLEM: problem}[level]("name", "found", "")
