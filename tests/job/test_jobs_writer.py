"""The output: the documented keys in their order, whole lines only, in completion or input order."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvcli.errors import OutputError, RowError
from nvcli.job.job import Choice, JobResult, Logprobs, RowContext, Usage, failed
from nvcli.job.output.reorder import ReorderBuffer
from nvcli.job.output.sink import OutputClosed, Sink
from nvcli.job.output.writer import ResultWriter


def result(index: int, text: str = "t", **extra: Any) -> JobResult:
    return JobResult(
        context=RowContext(id=f"r{index}", index=index, line=f"line {index + 1}", extra=extra),
        choices=[Choice(index=0, text=text, finish_reason="stop")],
        usage=Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
    )


def sink_of(path: Path) -> Sink:
    return Sink(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), str(path))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_row_has_the_documented_keys_in_order_and_then_what_was_passed_through(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    writer = ResultWriter(sink_of(path))
    writer.write([result(0, "héllo\n", topic={"a": 1})])
    writer.close()
    assert path.read_text() == (
        '{"id":"r0","index":0,"choices":[{"index":0,"text":"héllo\\n","finish_reason":"stop"}],'
        '"usage":{"prompt_tokens":3,"completion_tokens":2,"cached_tokens":1},"error":null,"topic":{"a":1}}\n'
    )


def test_a_failed_row_has_no_choices_and_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    writer = ResultWriter(sink_of(path))
    writer.write(
        [failed(RowContext(id=7, index=6, line="line 7", extra={"x": 1}), RowError("prompt_too_long", "too long"))]
    )
    writer.close()
    (row,) = rows_of(path)
    assert row["choices"] == []
    assert row["error"] == {"type": "prompt_too_long", "message": "line 7: too long"}
    assert row["x"] == 1


def test_foreign_keys_never_override_ours(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    writer = ResultWriter(sink_of(path))
    theirs = {"choices": "theirs", "error": "theirs", "usage": "theirs", "index": "theirs"}
    writer.write([msgspec.structs.replace(result(0), context=RowContext(id="a", index=0, line="line 1", extra=theirs))])
    writer.close()
    (row,) = rows_of(path)
    assert row["error"] is None
    assert row["index"] == 0
    assert row["choices"][0]["text"] == "t"


def test_token_ids_and_logprobs_appear_where_asked(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    logprobs = Logprobs(tokens=["a"], token_logprobs=[-0.5], top_logprobs=[{"a": -0.5, "b": -1.0}])
    choice = Choice(index=0, text="a", finish_reason="length", token_ids=[5], logprobs=logprobs)
    writer = ResultWriter(sink_of(path))
    writer.write([JobResult(context=RowContext(id=1, index=0, line="line 1"), choices=[choice])])
    writer.close()
    assert rows_of(path)[0]["choices"] == [
        {
            "index": 0,
            "text": "a",
            "finish_reason": "length",
            "token_ids": [5],
            "logprobs": {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5, "b": -1.0}]},
        }
    ]


@given(st.permutations(range(12)))
def test_input_order_is_kept_whatever_the_order_of_completion(order: list[int]) -> None:
    read_end, write_end = os.pipe()
    writer = ResultWriter(Sink(write_end, "pipe"), reorder=ReorderBuffer(max_bytes=1000))
    for index in order:
        writer.write([result(index)])
    writer.close()
    with open(read_end) as pipe:
        assert [json.loads(line)["index"] for line in pipe] == list(range(12))


def test_completion_order_is_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    writer = ResultWriter(sink_of(path))
    writer.write([result(2), result(0)])
    writer.write([result(1)])
    writer.close()
    assert [row["index"] for row in rows_of(path)] == [2, 0, 1]


def test_rows_reach_the_file_within_the_flush_interval(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    writer = ResultWriter(sink_of(path), sync_seconds=0.2)
    writer.write([result(0)])
    writer.tick()
    assert path.read_bytes() == b""
    time.sleep(0.2)
    writer.tick()
    assert len(rows_of(path)) == 1
    writer.close()


def test_a_reader_that_has_gone_is_told_apart(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    writer = ResultWriter(Sink(write_end, "pipe"))
    writer.write([result(0)])
    with pytest.raises(OutputClosed):
        writer.flush()
    writer.close_early()


def test_a_full_disk_is_reported() -> None:
    writer = ResultWriter(sink_of(Path("/dev/full")))
    writer.write([result(0)])
    with pytest.raises(OutputError, match="/dev/full cannot be written any further: No space left"):
        writer.flush()
    writer.close_early()
