"""What rows ask their answers to look like becomes a grammar once, and what does not costs its own rows."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nvcli.core.structured import MAX_GRAMMAR_BYTES, Structured
from nvcli.demo import demo_path
from nvcli.errors import LoadError, RowError
from nvcli.job.job import RETRYABLE_ERRORS
from nvcli.job.text.grammar_maker import GrammarMaker
from nvcli.job.text.guarded_process import GuardedProcess, NoAnswer
from nvcli.worker.executor.child_process import ChildProcess


@pytest.fixture(scope="module")
def maker() -> Iterator[GrammarMaker]:
    with closing(GrammarMaker(demo_path(), vocab_size=640, end_ids=(0, 2), max_kept_bytes=20_000)) as maker:
        yield maker


def asked(maker: GrammarMaker) -> list[bytes]:
    """What the process is asked from now on."""
    questions: list[bytes] = []
    ask = maker.worker.ask

    def note(question: Any, **options: Any) -> bytes | NoAnswer:
        questions.append(question)
        return ask(question, **options)

    maker.worker.ask = note  # type: ignore[method-assign]
    return questions


def refusal(maker: GrammarMaker, **wanted: Any) -> RowError:
    with pytest.raises(RowError) as error:
        maker.grammar(Structured(**wanted), name="`sampling.structured.x`")
    return error.value


def test_equal_ones_are_made_once_and_refusals_are_kept_too(maker: GrammarMaker) -> None:
    questions = asked(maker)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    first = maker.grammar(Structured(json_schema=schema), name="x")
    assert maker.grammar(Structured(json_schema=dict(schema)), name="y") is first
    assert "integer" in first.text
    for _ in range(2):
        error = refusal(maker, json_schema={"properties": {"a": {"type": "strng"}}})
        assert error.type == "invalid_structured"
        assert error.message == "`sampling.structured.x` cannot be used: Invalid type: strng (at #/properties/a)"
    assert len(questions) == 2
    for number in range(100):  # more than is kept
        maker.grammar(Structured(choice=[f"{number}"]), name="x")
    again = maker.grammar(Structured(json_schema=schema), name="x")
    assert again == first
    assert again is not first
    assert len(questions) == 103


def test_what_is_too_large_is_not_even_asked(maker: GrammarMaker) -> None:
    questions = asked(maker)
    error = refusal(maker, json_schema={"enum": ["x" * MAX_GRAMMAR_BYTES]})
    assert f"allowed: {MAX_GRAMMAR_BYTES:,}" in error.message
    assert questions == []


def test_a_process_that_is_killed_is_started_anew(maker: GrammarMaker) -> None:
    maker.grammar(Structured(choice=["here"]), name="x")
    process = maker.worker.process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert maker.grammar(Structured(choice=["there"]), name="x").text == 'start: TEXT\nTEXT: "there"'


def test_a_process_that_is_stopped_costs_no_row() -> None:
    """What it was asked is asked of another one. Only what takes too long there too is refused, and may be retried."""
    with closing(GrammarMaker(demo_path(), vocab_size=640, end_ids=(0, 2), max_seconds=0.5)) as maker:
        maker.grammar(Structured(choice=["before"]), name="x")
        stopped = maker.worker.process
        assert stopped is not None
        os.kill(stopped.pid, signal.SIGSTOP)
        assert maker.grammar(Structured(choice=["behind"]), name="x").text == 'start: TEXT\nTEXT: "behind"'
        assert not stopped.is_alive
        start = maker.worker._start

        def start_stopped() -> ChildProcess:
            process = start()
            os.kill(process.pid, signal.SIGSTOP)
            return process

        maker.worker._start = start_stopped  # type: ignore[method-assign]
        maker.worker._drop()
        questions = asked(maker)
        for _ in range(2):
            error = refusal(maker, choice=["never"])
            assert error.type in RETRYABLE_ERRORS
            assert "the process for it is not done after 0.5 s" in error.message
            assert "--retry-errors" in error.message
        assert len(questions) == 1


def test_a_model_without_its_tokenizer_file_refuses_constrained_rows_only(tmp_path: Path) -> None:
    with closing(GrammarMaker(tmp_path, vocab_size=640, end_ids=())) as maker:
        assert "tokenizer.json, which constrained answers need" in refusal(maker, choice=["a"]).message
        maker.close()
        assert refusal(maker, choice=["b"]).type == "aborted"


def test_work_that_does_not_end_is_ended_and_the_next_is_done() -> None:
    process = GuardedProcess("guarded_work:main", "", name="work", max_seconds=0.3)
    with closing(process):
        one = process.ask("one")
        started = time.monotonic()
        assert process.ask("wait") == NoAnswer("is not done after 0.3 s", is_late=True)
        assert time.monotonic() - started < 30
        assert process.ask("die") == NoAnswer("exited with code 3")
        two = process.ask("two")
    assert isinstance(one, bytes)
    assert isinstance(two, bytes)
    assert one.split()[1] != two.split()[1]
    process = GuardedProcess("guarded_work:main", "", name="work", max_seconds=1, patience=1)
    late = NoAnswer("is not done after 1 s", is_late=True)
    soon = NoAnswer("is not done after 0.1 s, all that is left once 1 rows have taken more than 1 s", is_late=True)
    with closing(process):
        assert [process.ask("wait", is_last=is_last) for is_last in (False, True, False, True)] == [late] * 2 + [
            soon
        ] * 2
        assert isinstance(process.ask("one"), bytes)
    full = GuardedProcess("guarded_work:main", "no room", name="work", max_seconds=1)
    with closing(full), pytest.raises(LoadError, match="no room"):
        full.ask("one")
