"""`nvcli show` as a user runs it: text for a pipe, pages for a terminal, and nothing that a terminal would obey."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fake_command import ENVIRON
from nvcli.cli.main import app
from nvcli.errors import ConfigError
from nvcli.tools.show.answers import read_shown_row
from nvcli.tools.show.page import Page

COMMAND = [sys.executable, "-m", "nvcli", "show"]


def line(index: int, *texts: str, **keys: Any) -> str:
    choices = [{"index": number, "text": text, "finish_reason": "stop"} for number, text in enumerate(texts)]
    usage = {"prompt_tokens": 5, "completion_tokens": 2000, "cached_tokens": 0}
    return json.dumps({"id": f"r{index}", "index": index, "choices": choices, "usage": usage, "error": None, **keys})


@pytest.fixture
def output(tmp_path: Path) -> Path:
    path = tmp_path / "out.jsonl"
    path.write_text("".join(line(index, f"answer {index}\n" * 20) + "\n" for index in range(2000)))
    return path


def test_a_row_as_text() -> None:
    row = read_shown_row(line(3, "a\x1b[2Jb", "c", topic="x\x9b", prompt="p").encode())
    assert row is not None
    assert Page(is_coloured=False).format(row, "p\r", prompt_keys=("prompt",)) == (
        ' 3  id r3  stop  5 + 2,000 tokens \np␍\n→ answer 0 (stop)\na␛[2Jb\n→ answer 1 (stop)\nc\ntopic: "x\\u009b"\n\n'
    )
    parts = {
        "reasoning_content": "so\x07",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
    }
    thinking = read_shown_row(
        line(5, choices=[{"index": 0, "text": "", "finish_reason": "tool_calls", **parts}]).encode()
    )
    assert thinking is not None
    assert Page(is_coloured=False).format(thinking, None).endswith(" tokens \nso␇\ncalls look({})\n\n")
    coloured = Page(is_coloured=True).format(row, None)
    assert "\x1b[1;7m 3  id r3" in coloured
    assert "\x1b[2J" not in coloured
    failed = read_shown_row(line(4, error={"type": "t", "message": "m\x07"}).encode())
    assert failed is not None
    assert "error t: m␇\n" in Page(is_coloured=False).format(failed, None)


def test_an_embedding_in_openais_form() -> None:
    body = {"object": "list", "data": [{"index": 0, "embedding": [0.5, 1]}], "usage": {"prompt_tokens": 4}}
    answer = {"id": "batch_req_2", "custom_id": "e", "response": {"status_code": 200, "body": body}, "error": None}
    row = read_shown_row(json.dumps(answer).encode())
    assert row is not None
    assert Page(is_coloured=False).format(row, None) == " 2  id e  embedding  4 + 0 tokens \n[0.5, 1]\n\n"


@pytest.mark.parametrize("score", [0.75, "0.75"])  # JSON, CSV
def test_a_class(score: float | str) -> None:
    answer = {"id": "a", "index": 2, "label": "good", "score": score, "classes": [], "error": None, "topic": "x"}
    row = read_shown_row(json.dumps(answer).encode())
    assert row is not None
    shown = Page(is_coloured=False).format(row, None)
    assert shown == ' 2  id a  score 0.7500  0 + 0 tokens \ngood\ntopic: "x"\n\n'


def test_options(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    monkeypatch.setenv("HOME", str(output.parent))

    def shown(*options: str) -> Any:
        return runner.invoke(app, ["show", f"~/{output.name}", *options])

    result = shown("--random", "3", "--json")
    assert [json.loads(row)["choices"][0]["finish_reason"] for row in result.stdout.splitlines()] == ["stop"] * 3
    assert shown("-n", "2").stdout.count("id r") == 2
    assert shown("--id", "r7").stdout.startswith(" 7  id r7")
    result = shown("--errors")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"nvcli: no row of {output} is of this kind\n"
    for wrong, message in (
        (["--id", "r7", "--errors"], "--id and --errors exclude each other"),
        (["--index", "x"], "--index x: allowed: an integer"),
        (["--random", "0"], "--random 0: allowed:"),
    ):
        error = shown(*wrong).exception
        assert isinstance(error, ConfigError)
        assert message in str(error)


def test_a_reader_that_leaves(output: Path) -> None:
    with subprocess.Popen([*COMMAND, str(output)], env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        assert done.stdout is not None
        assert done.stderr is not None
        done.stdout.read(10)
        done.stdout.close()
        assert (done.wait(timeout=60), done.stderr.read()) == (141, b"")


def test_a_pager_that_is_left(output: Path) -> None:
    """`head -c 30` is a pager that is left at once; the rest of the file is not read then."""
    ours, theirs = pty.openpty()
    environ = {**ENVIRON, "PAGER": "head -c 30", "TERM": "xterm"}
    with subprocess.Popen([*COMMAND, str(output)], env=environ, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
            while chunk := os.read(ours, 4096):
                shown += chunk
        os.close(ours)
        assert process.wait(timeout=60) == 0, shown
    assert shown.startswith(b"\x1b[1;7m 0  id r0  stop")
    assert len(shown) <= 30
