"""`scripts/fuzz_answers.py`: hostile texts are read in every format, and it would notice if one were not."""

from __future__ import annotations

import random

import pytest

import fuzz_answers
from fuzz_answers import CALLS, Fuzzer, TextMaker, fuzz_all, make_tokenizer
from nvcli.job.text import tool_calls
from nvcli.job.text.call_grammars import HARMONY, TOOL_FORMATS
from nvcli.job.text.reasoning import REASONING_FORMATS


def test_hostile_texts_of_all_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_answers, "MOST_LEVELS", 5000)
    counts = dict(fuzz_all(60, seed=3))
    assert set(CALLS) == {*TOOL_FORMATS, HARMONY}
    assert len(counts) == len(TOOL_FORMATS) + len(REASONING_FORMATS) + 2
    assert all(count.texts == 60 for count in counts.values())
    assert all(count.calls or count.thoughts for count in counts.values())
    assert sum(count.problems for count in counts.values()) > 60


@pytest.mark.parametrize(("name", "text"), CALLS.items())
def test_every_format_finds_the_calls_of_its_own_text(name: str, text: str) -> None:
    tokenizer = make_tokenizer()
    fuzzer = Fuzzer(tokenizer, random.Random(0), reasoning="none", tools=name)
    reading = fuzz_answers.AnswerFormat(
        reader=fuzzer.reader, state=fuzz_answers.PromptState.CLOSED, tools=fuzz_answers.TOOLS
    )
    ids, _ = fuzzer.encode(text)
    calls = fuzzer.reader.read(ids, reading, text_before_stop=None, skip_special_tokens=True).calls
    assert {call.name for call in calls} <= {"look", "wait"}
    assert calls


def test_what_is_raised_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(tool_calls, "_decode_first", fail)
    monkeypatch.setattr(TextMaker, "text", lambda self: CALLS["hermes"])
    fuzzer = Fuzzer(make_tokenizer(), random.Random(1), reasoning="none", tools="hermes")

    def read_some() -> None:
        for _ in range(20):  # some have no tools
            fuzzer.read_next()

    with pytest.raises(AssertionError, match=r"RuntimeError: bug\n.*state.*\n.*tool_call"):
        read_some()
