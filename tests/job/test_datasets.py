"""Outputs of all forms load in Hugging Face `datasets`, with every value in its column."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet
import pytest

from nvcli.errors import RowError
from nvcli.job.job import (
    Choice,
    EmbedAnswer,
    FunctionCall,
    JobResult,
    Logprobs,
    RowContext,
    RowForm,
    ScoreAnswer,
    ScoredChoice,
    ToolCall,
    Usage,
    failed,
)
from nvcli.job.output.writer import ResultWriter
from output_jobs import errors_of, open_job

LOGPROBS = Logprobs(tokens=["a", "b"], token_logprobs=[None, -1.5], top_logprobs=[None, {"b": -1.5, '"': -2.0}])
COPIED = {b"topic": b'"sums"', b"weight": b"1.5", b"tags": b'["a",1]', b"missing": b"null"}


def context(index: int, form: RowForm = RowForm.NATIVE) -> RowContext:
    extra = {key.decode(): msgspec.Raw(value) for key, value in COPIED.items()}
    return RowContext(id=f"r{index}", index=index, line=f"line {index + 1}", form=form, extra=extra)


def failing(form: RowForm) -> JobResult:
    return failed(context(0, form), RowError("prompt_too_long", "too long"))


def generated(form: RowForm) -> list[JobResult]:
    call = ToolCall(id="k3Xw90aQz", function=FunctionCall(name="weather", arguments="{}"))
    rich = Choice(
        index=0,
        text="ab",
        finish_reason="tool_calls",
        reasoning_content="hm",
        tool_calls=[call],
        token_ids=[1, 2],
        logprobs=LOGPROBS if form is not RowForm.CHAT else None,
        score=-0.75,
    )
    plain = Choice(index=0, text="c", finish_reason="stop")
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    return [
        failing(form),
        JobResult(context=context(1, form), choices=[plain], usage=usage),
        JobResult(context=context(2, form), choices=[rich], usage=usage, prompt_logprobs=LOGPROBS),
    ]


def scored() -> list[JobResult]:
    choice = ScoredChoice(
        index=0,
        text=" b",
        logprob=-1.5,
        num_tokens=1,
        num_bytes=2,
        score=-1.5,
        perplexity=4.5,
        is_greedy=False,
        tokens=[" b"],
        token_logprobs=[-1.5],
    )
    answer = ScoreAnswer(choices=[choice], best=0, correct=True)
    return [failing(RowForm.SCORE), JobResult(context=context(1, RowForm.SCORE), answer=answer)]


def embedded(form: RowForm = RowForm.EMBEDDING) -> list[JobResult]:
    return [failing(form), JobResult(context=context(1, form), answer=EmbedAnswer(embedding=[0.5, -0.25]))]


JOBS = {
    "generate": generated(RowForm.NATIVE),
    "chat": generated(RowForm.CHAT),
    "completions": generated(RowForm.COMPLETION),
    "score": scored(),
    "embed": embedded(),
    "embeddings": embedded(RowForm.OPENAI_EMBEDDING),
    "failures alone": [failing(RowForm.NATIVE)],
    "no failures": generated(RowForm.NATIVE)[1:2],
}


def write_output(path: Path, results: Sequence[JobResult]) -> None:
    output = open_job(path)
    writer = ResultWriter(output.sink, output.form)
    writer.write(results)
    writer.close()
    output.finish(rows=len(results), errors=errors_of(results), rows_read=len(results), all_read=True)
    output.close()


@pytest.mark.parametrize("name", JOBS)
def test_every_form_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    results = JOBS[name]
    for suffix, builder in (("jsonl", "json"), ("csv", "csv"), ("parquet", "parquet")):
        path = tmp_path / f"out.{suffix}"
        write_output(path, results)
        loaded = datasets.load_dataset(builder, data_files=str(path), split="train", cache_dir=str(tmp_path / suffix))
        rows = list(loaded)
        assert len(rows) == len(results), suffix
        assert [row["topic"] for row in rows] == ["sums"] * len(results)
        assert [row["weight"] for row in rows] == [1.5] * len(results)
        assert [row["error"] is None for row in rows] == [result.error is None for result in results]
        if suffix == "parquet":
            check_native(name, rows)


def check_native(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Check the values that are nested columns of a Parquet table."""
    if name == "generate":
        choice = rows[2]["choices"][0]
        assert (choice["text"], choice["token_ids"], choice["tool_calls"][0]["function"]["name"]) == (
            "ab",
            [1, 2],
            "weather",
        )
        top = [None, [{"token": "b", "logprob": -1.5}, {"token": '"', "logprob": -2.0}]]
        assert choice["logprobs"]["top_logprobs"] == rows[2]["prompt_logprobs"]["top_logprobs"] == top
    elif name == "score":
        assert (rows[1]["best"], rows[1]["correct"], rows[1]["choices"][0]["token_logprobs"]) == (0, True, [-1.5])
    elif name == "embed":
        assert rows[1]["embedding"] == [0.5, -0.25]


@pytest.mark.parametrize("name", [*JOBS, "no rows"])
def test_tables_have_no_maps_and_no_columns_without_a_type(tmp_path: Path, name: str) -> None:
    write_output(tmp_path / "out.parquet", JOBS.get(name, []))
    schema = str(pyarrow.parquet.read_schema(tmp_path / "out.parquet"))
    assert "map<" not in schema
    assert ": null" not in schema
