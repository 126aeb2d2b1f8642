"""Texts of others do nothing on a terminal but stand there."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from nvcli.core.system.terminal_text import harmless, one_line, without_secrets


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    shown = harmless(text)
    assert not [
        letter
        for letter in shown
        if letter not in "\n\t" and (unicodedata.category(letter) == "Cc" or 0x202A <= ord(letter) <= 0x202E)
    ]
    assert "\n" not in one_line(text)
    assert len(one_line(text.replace("\x80", ""), 5)) <= 5 * 6


def test_what_is_shown_in_their_place() -> None:
    assert harmless("a\x1b]0;title\x07\r\n\tb\x7f\x9b\u202e") == "a␛]0;title␇␍\n\tb␡\\x9b\\u202e"
    assert one_line("  a\n b   c ") == "a b c"
    assert one_line("abcdef", 5) == "abcd…"
    assert one_line("abcde", 5) == "abcde"


def test_what_addresses_keep_secret_is_not_shown() -> None:
    for text, shown in (
        ("https://me:p@ss@host/x.jsonl: gone", "https://***@host/x.jsonl: gone"),
        ("https://host/x?sig=a:b&c: gone", "https://host/x?***: gone"),
        ("nvcli generate 's3://KEY:S@bucket/a?.jsonl' -m demo", "nvcli generate 's3://***@bucket/a?.jsonl' -m demo"),
        ("https://u:p@h/x?k='1'", "https://***@h/x?***'1'"),
        ("s3://KEY:S/e?c#r+t@bucket/x: gone", "s3://***@bucket/x: gone"),
        ("https://host:8080/a@b and hf://o/n@commit:train", "https://host:8080/a@b and hf://o/n@commit:train"),
        ("ask me@host about https://h/y", "ask me@host about https://h/y"),
    ):
        assert without_secrets(text) == shown
