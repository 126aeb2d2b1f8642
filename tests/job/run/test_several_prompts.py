"""Rows of OpenAI batch files with several prompts are computed prompt by prompt and answered as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine
from file_jobs import generate
from kept_lines import KeptLines
from nvcli.core.config import JobConfig, RunConfig
from nvcli.engine.request import Request
from nvcli.job.progress.summary import Summary
from nvcli.job.run.several_prompts import MAX_PARTS_AT_ONCE

pytestmark = pytest.mark.usefixtures("tokenizer")


def run(folder: Path, model: Path, rows: list[dict[str, Any]], **job: Any) -> tuple[Summary, list[Any], list[Request]]:
    source, engines = folder / "in.jsonl", []
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start(config: Any) -> FakeEngine:
        engines.append(FakeEngine(config))
        return engines[-1]

    config = RunConfig(model=str(model), device="cpu", max_num_seqs=8, job=JobConfig(order="input", **job))
    summary = generate(
        config,
        inputs=[str(source)],
        output=str(folder / "out.jsonl"),
        progress=KeptLines(),
        overwrite=True,
        start=start,
    )
    return summary, [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()], engines[0].received


def row(name: str, prompt: Any, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "url": "/v1/completions", "body": {"prompt": prompt, **body}, "topic": name}


def test_choices_come_in_the_order_of_the_prompts(tmp_path: Path, model_folder: Path) -> None:
    many = [f"p{number}" for number in range(MAX_PARTS_AT_ONCE + 5)]
    rows = [row("a", ["ab", "cd", [101, 102]], n=2), {"prompt": "xy"}, row("b", many), row("c", ["one"])]
    summary, (first, native, second, third), received = run(tmp_path, model_folder, rows)
    body = first["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"][:4]] == ["ba", "ba", "dc", "dc"]
    assert body["usage"]["prompt_tokens"] == 3 + 3 + 2
    assert first["topic"] == "a"
    assert native["choices"][0]["text"] == "yx"
    assert [choice["text"] for choice in second["response"]["body"]["choices"]] == [text[::-1] for text in many]
    assert [choice["text"] for choice in third["response"]["body"]["choices"]] == ["eno"]
    assert (summary.rows, summary.counts.rows_done, summary.errors) == (4, 4, {})
    assert summary.counts.prompt_tokens == sum(len(request.prompt_ids) // 4 for request in received)
    # Each sample of a row has random numbers of its own.
    samples = [sample for request in received if request.row == 0 for sample in request.samples()]
    assert sorted(sample.sample for sample in samples) == list(range(6))


def test_one_bad_prompt_is_the_error_of_its_row(tmp_path: Path, model_folder: Path) -> None:
    rows = [row("a", ["ab", "x" * 100, ""]), row("b", ["cd", "ef"])]
    summary, (bad, good), _ = run(tmp_path, model_folder, rows)
    assert bad["error"]["code"] == "prompt_too_long"
    assert bad["error"]["message"].startswith("line 1, prompt 2 of 3: the prompt has 101 tokens")
    assert [choice["text"] for choice in good["response"]["body"]["choices"]] == ["dc", "fe"]
    assert (summary.rows, summary.errors) == (2, {"prompt_too_long": 1})


def test_equal_prompts_are_computed_once_where_their_answers_are_equal(tmp_path: Path, model_folder: Path) -> None:
    greedy = row("a", ["ab", "ab", "cd"], temperature=0)
    drawn = row("b", ["ab", "ab"], temperature=1, seed=7)
    summary, (first, second), received = run(tmp_path, model_folder, [greedy, drawn])
    assert len(received) == 4
    assert [len(each["response"]["body"]["choices"]) for each in (first, second)] == [3, 2]
    assert (summary.counts.rows_done, summary.counts.deduplicated_tokens > 0) == (2, True)
