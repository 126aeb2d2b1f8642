"""How many prompt tokens are computed with and without the plan, where the KV cache is too small for all prefixes.

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
import time
from pathlib import Path

from demo_tasks import raw_prompt, sample_lookups
from nvcli.config import JobConfig, RunConfig
from nvcli.job_run.generate import generate
from nvcli.job_run.progress.display import Progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefixes", type=int, default=20)
    parser.add_argument("--questions", type=int, default=30, help="for each prefix")
    parser.add_argument("--pairs", type=int, default=80, help="length of the lists")
    parser.add_argument("--kv-cache-memory", default="12MiB")
    parser.add_argument("--dp", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(0)
    rows = [
        {"prompt": raw_prompt(example), "sampling": {"temperature": 0, "max_tokens": 16}}
        for _ in range(args.prefixes)
        for example in sample_lookups(rng, args.questions, args.pairs)
    ]
    rng.shuffle(rows)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        answers = {}
        for plan in (False, True):
            output = Path(folder) / f"{plan}.jsonl"
            run = RunConfig(
                model="demo",
                device="cpu",
                kv_cache_memory=args.kv_cache_memory,
                block_size=16,
                max_model_len=2048,
                max_num_seqs=16,
                data_parallel_size=args.dp,
                job=JobConfig(plan=plan),
            )
            started = time.perf_counter()
            summary = generate(run, inputs=[str(path)], output=str(output), progress=Progress(sys.stderr))
            seconds = time.perf_counter() - started
            results = [json.loads(line) for line in output.read_text().splitlines()]
            answers[plan] = {row["index"]: [choice["text"] for choice in row["choices"]] for row in results}
            counts = summary.counts
            computed = counts.prompt_tokens - counts.cached_tokens
            print(
                f"plan {str(plan).lower():<5} {computed:>9,} of {counts.prompt_tokens:,} prompt tokens computed, "
                f"{summary.times.generating:.1f} s generating ({seconds:.1f} s in all), "
                f"{counts.num_preemptions} preemptions"
            )
        print("the same answers:", answers[False] == answers[True])


if __name__ == "__main__":
    main()
