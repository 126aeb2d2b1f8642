"""The summary says how rows came out, what was set by whom, and what to type next."""

from __future__ import annotations

from typing import Any

from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.request import EngineStats
from nvcli.job.job import Choice, ErrorInfo, JobResult, RowContext, Usage
from nvcli.job.progress.summary import RunTimes, Summary, format_summary
from nvcli.job.run.counts import Counts
from nvcli.job.run.settings import Setting
from prepared_rows import prepared_row

TIMES = RunTimes(
    total=75.0,
    generating=50.0,
    startup={"load weights": 2.0},
    loading_tokenizer=3.0,
    reading=0.5,
    tokenizing=0.7,
)


def make_summary(**fields: Any) -> Summary:
    """995 rows are answered, 3 of them in this run; 5 failed, 1 of them in this run."""
    counts = Counts(SamplingParams(max_tokens=100))
    for index, reason in enumerate(("stop", "stop", "length")):
        context = RowContext(id=f"r{index}", index=index, line=f"line {index + 1}")
        choice = Choice(index=0, text="one\ntwo\x1b[31m", finish_reason=reason)
        row = prepared_row(index, [1] * 10, max_tokens=100 if index else 7)
        counts.add(row, JobResult(context=context, choices=[choice], usage=Usage(prompt_tokens=10)))
    bad = RowContext(id="bad", index=9, line="line 10")
    counts.add(None, JobResult(context=bad, error=ErrorInfo(type="invalid_json", message="line 10: not valid JSON")))
    counts.rows_resumed = 996
    counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens = 12345, 300, 50000
    counts.rows_deduplicated, counts.deduplicated_tokens = 17, 1234
    counts.replicas = [EngineStats(num_preemptions=2, kv_bytes_saved=3 << 39)]
    counts.seconds.update({"writing": 1.5, "waiting for the engines": 40.0, "detokenizing": 0.001})
    given: dict[str, Any] = {
        "output": "out.jsonl",
        "rows": 1000,
        "errors": {"invalid_json": 1, "prompt_too_long": 4},
        "counts": counts,
        "times": TIMES,
        "sampling": [
            Setting(key="sampling.max_tokens", value=100, origin="run.yaml:3"),
            Setting(key="sampling.temperature", value=1.0, origin="default"),
            Setting(key="sampling.top_p", value=1.0, origin="default"),
            Setting(key="sampling.top_k", value=20, origin="generation_config.json"),
            Setting(key="sampling.stop", value=["A", "B"], origin="--stop"),
        ],
    }
    return Summary(**{**given, **fields})


def test_what_a_user_wants_to_know() -> None:
    steps = {"nvcli show out.jsonl --errors": "shows the failed rows", "nvcli generate in.jsonl": "more"}
    assert format_summary(make_summary(), next_steps=steps).splitlines() == [
        "995 of 1,000 rows answered in 1m15s (996 by an earlier run) → out.jsonl",
        "  equal     17 rows answered with the answer of an equal row (1,234 tokens not computed)",
        '  stop      2 answers, such as r0: "one two\u241b[31m"',
        '  length    1 answer cut at `max_tokens` or `max_model_len`, such as r2: "one two\u241b[31m"',
        "  failed    prompt_too_long 4",
        "            invalid_json 1, such as bad: line 10: not valid JSON",
        "  tokens    prompt 12,345 (300 not computed: in the prefix cache, 2%), generated 50,000",
        "  shared    1.50 TiB of the KV cache not read again for each row",
        "  speed     1,000 generated and 247 prompt tokens/s, 0.1 rows/s",
        '  sampling  max_tokens 100 (run.yaml:3); top_k 20 (generation_config.json); stop ["A", "B"] (--stop); '
        "temperature 1.0 (default); max_tokens in 1 row (the row's own)",
        "  note      2 preemptions: the KV cache was full; more memory or a smaller `max_num_seqs` avoids computing "
        "these twice",
        "  next      nvcli show out.jsonl --errors  # shows the failed rows",
        "            nvcli generate in.jsonl  # more",
    ]


def test_details_are_for_verbose_alone() -> None:
    details = set(format_summary(make_summary(), verbosity="verbose").splitlines())
    assert details - set(format_summary(make_summary()).splitlines()) == {
        "  time      generating 50s, start-up (load weights 2.0s); meanwhile tokenizer import 3.0s, reading 0.5s, "
        "tokenizing 0.7s",
        "  parent    waiting for the engines 40s, writing 1.5s",
    }


def test_quiet_says_only_that_rows_failed() -> None:
    assert format_summary(make_summary(), verbosity="quiet") == (
        "5 of 1,000 rows failed: prompt_too_long 4, invalid_json 1"
    )
    assert format_summary(make_summary(errors={}), verbosity="quiet") == ""


def test_gpu_hours_are_those_of_all_gpus_from_the_command_to_its_end() -> None:
    text = format_summary(make_summary(num_gpus=4))
    assert "  GPUs      0.0833 GPU-hours (4 GPUs for 1m15s)" in text.splitlines()
    assert "GPU" not in format_summary(make_summary())


def test_a_limit_says_that_there_is_more() -> None:
    few, kept = (format_summary(make_summary(rows=rows, limit=20)) for rows in (20, 21))
    assert "these are the first 20 rows; without --limit the others follow" in few
    assert "--limit 20: later rows that were answered before are kept" in kept


def test_prompt_tokens_that_were_not_computed_count_for_each_sample() -> None:
    summary = make_summary()
    summary.counts.replicas = [EngineStats(prompt_tokens=64 * 12_345, cached_tokens=63 * 12_345)]
    assert "prompt 12,345 (777,735 of 790,080 not computed: in the prefix cache, 98%)" in format_summary(summary)
