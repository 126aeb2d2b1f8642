"""Counts the prompt tokens computed with and without the plan, where the KV cache is too small for all prefixes.

    python scripts/bench_planning.py [--prefixes 20] [--questions 30] [--kv-cache-memory 12MiB]

Questions about `--prefixes` long lists, in random order, answered greedily by the built-in model in a real engine. The
answers are the same either way; the script checks it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmark import Case, run_benchmark
from demo_tasks import raw_prompt, sample_lookups
from nvcli.core.config import JobConfig, RunConfig
from nvcli.job.progress.display import Progress
from nvcli.job.run.generate import generate


def make_rows(options: argparse.Namespace) -> list[str]:
    rng = random.Random(0)
    rows = [
        json.dumps({"prompt": raw_prompt(example), "sampling": {"temperature": 0, "max_tokens": 16}}) + "\n"
        for _ in range(options.prefixes)
        for example in sample_lookups(rng, options.questions, options.pairs)
    ]
    rng.shuffle(rows)
    return rows


def cases(options: argparse.Namespace, stack: ExitStack) -> Iterator[Case]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(make_rows(options)))
    answers: list[dict[int, list[str]]] = []

    def measure(plan: bool, number: int) -> dict[str, float]:
        run = RunConfig(
            model="demo",
            device="cpu",
            kv_cache_memory=options.kv_cache_memory,
            block_size=16,
            max_model_len=2048,
            max_num_seqs=16,
            data_parallel_size=options.dp,
            job=JobConfig(plan=plan),
        )
        progress = Progress(sys.stderr)
        summary = generate(run, inputs=[str(source)], output=str(output), progress=progress, overwrite=True)
        results = [json.loads(line) for line in output.read_text().splitlines()]
        answers.append({row["index"]: [choice["text"] for choice in row["choices"]] for row in results})
        if answers[-1] != answers[0]:
            raise SystemExit("the answers differ with and without the plan")
        counts = summary.counts
        return {
            "computed prompt tokens": counts.prompt_tokens - counts.cached_tokens,
            "prompt tokens": counts.prompt_tokens,
            "generating, s": summary.times.generating,
            "preemptions": counts.engine_total("num_preemptions"),
        }

    for plan in (False, True):
        yield Case(f"job.plan={str(plan).lower()}", partial(measure, plan))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefixes", type=int, default=20)
    parser.add_argument("--questions", type=int, default=30, help="for each prefix")
    parser.add_argument("--pairs", type=int, default=80, help="length of the lists")
    parser.add_argument("--kv-cache-memory", default="12MiB")
    parser.add_argument("--dp", type=int, default=1)


if __name__ == "__main__":
    run_benchmark(__doc__, cases, add_options, compared="computed prompt tokens")
