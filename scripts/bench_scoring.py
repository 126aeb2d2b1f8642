"""Multiple choice: rows per second of `LLM.score`, and of lm-eval with transformers, on the same rows.

    python scripts/bench_scoring.py --rows 200               # needs `pip install lm-eval`
    python scripts/bench_scoring.py --rows 10000 --no-lm-eval --device cuda --model Qwen/Qwen3-8B

A row has a context of about `--context-tokens` tokens and four choices of several tokens. Both sides have the model
loaded before the clock starts, and get the same texts; lm-eval is `HFLM.loglikelihood` as its tasks call it, with
`--batch-size` texts at a time. The largest difference of their log-probabilities is shown too. On a GPU also the share
of the limit: of the least time that the matrix products of the layers and the LM head need there.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmark import Case, Figures, run_benchmark
from demo_tasks import WORDS
from nvcli import LLM
from nvcli.core.config import RunConfig
from nvcli.demo import demo_path
from nvcli.job.run.engine_settings import load_checkpoint, resolve_engines
from nvcli.sizing.costs import model_costs
from nvcli.tools.bench.ceilings import measure_ceilings

NUM_CHOICES = 4
CHOICE_WORDS = 8
WORDS_PER_TOKEN = 0.99
"""Words of the built-in model's tasks for each of its tokens, about."""


def make_rows(count: int, context_tokens: int, seed: int = 0) -> list[dict[str, Any]]:
    """Make rows with contexts of their own: a long list of words, and choices that may go on with it."""
    rng = random.Random(seed)

    def words(number: int) -> str:
        return " ".join(rng.choices(WORDS, k=number))

    return [
        {
            "prompt": f"Repeat these words: {words(int(context_tokens * WORDS_PER_TOKEN))}",
            "choices": [f" {words(CHOICE_WORDS)}" for _ in range(NUM_CHOICES)],
        }
        for _ in range(count)
    ]


Scorer = Callable[[Sequence[dict[str, Any]]], list[list[float]]]


def lm_eval_scorer(model_path: str, device: str, batch_size: int) -> Scorer:
    """Load the model as lm-eval does, and return what scores rows with it."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    dtype = "float32" if device == "cpu" else "bfloat16"
    model = HFLM(pretrained=model_path, device=device, dtype=dtype, batch_size=batch_size)

    def score(rows: Sequence[dict[str, Any]]) -> list[list[float]]:
        requests = [
            Instance("loglikelihood", {}, (row["prompt"], choice), number)
            for row in rows
            for number, choice in enumerate(row["choices"])
        ]
        found = [logprob for logprob, _ in model.loglikelihood(requests, disable_tqdm=True)]
        return [found[at : at + NUM_CHOICES] for at in range(0, len(found), NUM_CHOICES)]

    return score


class NvcliScorer:
    """Scores rows with a loaded model, and counts the work."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.num_prompt_tokens = 0
        """Tokens of the last rows, each row's context once."""
        self.num_scored_tokens = 0

    def __call__(self, rows: Sequence[dict[str, Any]]) -> list[list[float]]:
        answers = list(self._llm.score(rows, order="input"))
        self.num_prompt_tokens = sum(answer["usage"]["prompt_tokens"] for answer in answers)
        self.num_scored_tokens = sum(choice["num_tokens"] for answer in answers for choice in answer["choices"])
        return [[choice["logprob"] for choice in answer["choices"]] for answer in answers]

    def least_seconds(self, model_path: str, device: str) -> float:
        """Return the time that the last rows' products with matrices need on this device, at its measured rate."""
        run = RunConfig(model=model_path, device=device)
        path = Path(model_path)
        model, config, *_ = resolve_engines(run, path, load_checkpoint(run, path))
        costs = model_costs(model, config.dtype)
        operations = self.num_prompt_tokens * costs.operations_per_token
        operations += self.num_scored_tokens * costs.lm_head.operations_per_row
        return operations / measure_ceilings(config).flops_per_second


def cases(options: argparse.Namespace, stack: ExitStack) -> Iterator[Case]:
    nvcli_scorer = NvcliScorer(stack.enter_context(LLM(options.model, device=options.device)))
    scorers: dict[str, Scorer] = {"nvcli": nvcli_scorer}
    if not options.no_lm_eval:
        scorers["lm-eval"] = lm_eval_scorer(options.model, options.device, options.batch_size)
    found: dict[str, list[list[float]]] = {}

    def measure(name: str, number: int) -> Figures:
        rows = make_rows(options.rows, options.context_tokens, seed=number)  # others than before: no cache
        started = time.perf_counter()
        found[name] = scorers[name](rows)
        seconds = time.perf_counter() - started
        differences = np.abs(np.array(found["nvcli"]) - np.array(found[name]))
        figures = {"rows/s": options.rows / seconds, "seconds": seconds}
        if options.device == "cuda" and name == "nvcli":
            figures["% of the limit"] = 100 * nvcli_scorer.least_seconds(options.model, options.device) / seconds
        return {**figures, "difference": float(differences.max())}

    for name, scorer in scorers.items():
        yield Case(name, partial(measure, name), partial(scorer, make_rows(2, options.context_tokens, seed=-1)))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--context-tokens", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--model", default=str(demo_path()), help="a folder; for nvcli alone also a Hugging Face id")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--no-lm-eval", action="store_true")


if __name__ == "__main__":
    run_benchmark(__doc__, cases, add_options, repeat=2, compared="rows/s")
