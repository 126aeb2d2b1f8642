"""Answers on a terminal are whole lines: no progress bar is in their way."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from fake_command import ENVIRON, nvcli_command
from nvcli.cli.answers import show_stream
from nvcli.llm.answer import Answer
from nvcli.llm.llm import AnswerStream
from warm_process import WarmPopen


class FailedStream:
    """An answer that fails behind its first piece."""

    text = "4"
    answer = Answer({"choices": [], "error": {"type": "non_finite_logits", "message": "m"}})

    def __iter__(self) -> Iterator[str]:
        return iter(["4"])


def test_an_answer_that_fails_in_its_middle_is_a_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    show_stream(cast(AnswerStream, FailedStream()))
    assert capsys.readouterr().out == "4\n"


@pytest.mark.parametrize("progress", ["auto", "bar"])
def test_no_bar_is_drawn_into_answers(tmp_path: Path, progress: str) -> None:
    (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt": "row {index}"}}\n' for index in range(30)))
    slowly = "polls_until_ready=300, on_poll=lambda: __import__('time').sleep(0.3)"  # the bar is there before the rows
    arguments = ("generate", "in.jsonl", "-m", "demo", "-o", "-", "--progress", progress)
    parent, child = os.openpty()
    process = WarmPopen(
        nvcli_command(*arguments, cwd=tmp_path, fakes=slowly),
        cwd=tmp_path,
        env={**ENVIRON, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=child,
    )
    os.close(child)
    text = b""
    with contextlib.suppress(OSError):  # Linux's way of saying that the other end is closed
        while data := os.read(parent, 65536):
            text += data
    os.close(parent)
    assert process.wait(timeout=60) == 0
    lines = text.decode().splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(rows) == 30
    assert all(line.startswith(("{", "nvcli: ", "  ")) for line in lines)
    assert b"\x1b" not in text
