"""`scripts/profile_steps.py` says what it cannot record; it records on GPUs."""

from __future__ import annotations

import sys

import pytest

import profile_steps


def test_answers_that_end_before_all_steps_are_recorded_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["profile_steps.py", "qwen3-8b", "--output-len", "128:900"])
    with pytest.raises(SystemExit):
        profile_steps.main()
    message = capsys.readouterr().err
    for part in ("--generated 300", "--steps 50", "400 tokens", "--output-len 128:900", "of 128"):
        assert part in message
