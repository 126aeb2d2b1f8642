"""A chat template that a job names: read and refused before a model is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvcli.core.chat_template import read_chat_template, unknown_variables
from nvcli.errors import ConfigError


def test_a_template_with_the_tags_that_transformers_knows(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    text = "{% for m in messages %}{% if m %}{% continue %}{% endif %}{% generation %}ü{% endgeneration %}{% endfor %}"
    path.write_text("\ufeff" + text)
    assert read_chat_template(path) == text


def test_variables_that_a_template_does_not_name() -> None:
    template = "{% set x = 1 %}{% if enable_thinking is defined and enable_thinking is false %}{{ x }}{% endif %}"
    given = ["enable_thinking", "enable_thinkin", "x", "continue_final_message"]
    assert unknown_variables(template, given) == ["enable_thinkin", "x"]
    assert unknown_variables("{% if %}", given) == []
    large = "{{ 2 ** (9 ** 9) }}{% set n = 2 ** (9 ** 9) %}{% if 2 ** (9 ** 9) == x %}{% endif %}"
    assert unknown_variables(large, given) == ["enable_thinking", "enable_thinkin"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"a\n{% if %}", r"t\.jinja:2: not a Jinja template: Expected an expression"),
        (b"{% for m in messages %}", r"t\.jinja:1: not a Jinja template: Unexpected end"),
        (b"{% nothing %}", "unknown tag 'nothing'"),
        (b"\xff", r"not UTF-8 text \(byte 0\)"),
        (b"(" * 100_000, "a b"),
    ],
)
def test_a_file_that_is_no_template(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "t.jinja"
    if data.startswith(b"("):
        data, reason = b"{{ " + data + b" }}", "nested too deeply|not a Jinja template"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=reason):
        read_chat_template(path)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.jinja cannot be read: no such file"):
        read_chat_template(tmp_path / "gone.jinja")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="it is a FIFO"):
        read_chat_template(tmp_path / "fifo")
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(20_000_000)
    with pytest.raises(ConfigError, match="more than the 10,000,000"):
        read_chat_template(large)
