"""A job whose first rows all fail with one cause ends; what is written stays, and other settings begin it anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine
from file_jobs import generate
from kept_lines import KeptLines
from nvcli.core.config import JobConfig, RunConfig
from nvcli.errors import HopelessJob
from nvcli.job.job import ErrorInfo, JobResult, RowContext
from nvcli.job.run.counts import LeadingErrors

pytestmark = pytest.mark.usefixtures("tokenizer")
BAD, OTHER, GOOD = {"prompt": 5}, {"prompt_token_ids": []}, {"prompt": "ab"}


def run(folder: Path, model: Path, rows: list[Any], sampling: dict[str, Any] | None = None, **job: Any) -> list[str]:
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = RunConfig(
        model=str(model), device="cpu", sampling=sampling or {}, job=JobConfig(**{"max_leading_errors": 10, **job})
    )
    progress = KeptLines()
    generate(config, inputs=[str(source)], output=str(folder / "out.jsonl"), progress=progress, start=FakeEngine)
    return progress.lines


def output(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def test_the_first_rows_all_fail(tmp_path: Path, model_folder: Path) -> None:
    rows = [*[BAD] * 12, *[GOOD] * 3]
    with pytest.raises(
        HopelessJob, match="the first 10 rows all failed with invalid_value, such as line 1: `prompt` is"
    ):
        run(tmp_path, model_folder, rows)
    assert {row["error"]["type"] for row in output(tmp_path) if row["error"]} == {"invalid_value"}
    run(tmp_path, model_folder, rows)  # the same command goes on behind them, where rows are good
    assert sorted(row["index"] for row in output(tmp_path) if row["error"] is None) == [12, 13, 14]


@pytest.mark.parametrize(
    ("rows", "job"),
    [
        ([*[BAD] * 9, GOOD], {}),
        ([GOOD, *[BAD] * 30], {}),
        ([BAD] * 9, {}),
        ([OTHER, *[BAD] * 30], {}),
        ([BAD] * 30, {"max_leading_errors": 0}),
    ],
)
def test_a_job_that_goes_on(tmp_path: Path, model_folder: Path, rows: list[Any], job: dict[str, Any]) -> None:
    run(tmp_path, model_folder, rows, **job)
    assert len(output(tmp_path)) == len(rows)


def test_a_job_with_answers_goes_on(tmp_path: Path, model_folder: Path) -> None:
    run(tmp_path, model_folder, [GOOD, *[BAD] * 30])
    lines = (tmp_path / "out.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_text("".join(line for line in lines if '"error":null' in line))
    run(tmp_path, model_folder, [GOOD, *[BAD] * 30])
    assert len(output(tmp_path)) == 31


def test_an_output_without_answers_is_begun_anew_by_other_settings(tmp_path: Path, model_folder: Path) -> None:
    run(tmp_path, model_folder, [BAD] * 3)
    notes = run(tmp_path, model_folder, [BAD] * 3, {"max_tokens": 3})
    assert "out.jsonl has no answers, but 3 failed rows of a job with other settings; it is started over" in notes[0]
    assert "sampling.max_tokens: not set → 3" in notes[0]
    assert "out.jsonl" not in "".join(run(tmp_path, model_folder, [BAD] * 3, {"max_tokens": 3}))


def test_an_empty_input_is_warned_of(tmp_path: Path, model_folder: Path) -> None:
    assert f"warning: {tmp_path / 'in.jsonl'} holds no rows" in run(tmp_path, model_folder, [])


def test_rows_may_be_done_in_any_order() -> None:
    def done(index: int, error: str | None) -> JobResult:
        info = None if error is None else ErrorInfo(type=error, message=str(index))
        return JobResult(context=RowContext(id=index, index=index, line=""), error=info)

    leading = LeadingErrors(3)
    for index in range(10, 16):
        leading.expect(index)
    for index in (15, 12, 10):
        leading.add(done(index, "a"))
        assert (leading.is_open, leading.all_failed) == (True, False)
    leading.add(done(11, "a"))
    assert (leading.is_open, leading.all_failed) == (False, True)
    assert leading.first is not None
    assert leading.first.message == "12"
    for other in ("b", None):
        leading = LeadingErrors(1)
        leading.expect(0)
        leading.expect(1)
        leading.add(done(1, other))
        leading.add(done(0, "a"))
        assert (leading.is_open, leading.all_failed) == (False, other == "b")
