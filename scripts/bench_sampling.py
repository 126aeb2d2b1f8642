"""Measures what sampling parameters cost: output tokens per second of rows that are plain, or ask for one thing more.

    python scripts/bench_sampling.py --model FOLDER --rows 768 --max-num-seqs 256
    python scripts/bench_sampling.py --rows 64 --tokens 32         # the built-in model

Plain rows are sampled with temperature 0.7, top_k 20 and top_p 0.8; the others ask for one thing more. Prompts have 50
to 400 random tokens, answers have `--tokens` tokens whatever comes. A short job of each kind comes before.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmark import Case, run_benchmark
from nvcli import LLM

PLAIN = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition_penalty 1.05": {"repetition_penalty": 1.05},
    "presence_penalty 1.5": {"presence_penalty": 1.5},
    "40 biases": {"logit_bias": {str(7 * i + 5): -5.0 for i in range(40)}},
    "repetition_penalty 1.05 in every fifth row": {"repetition_penalty": 1.05},
}
FIRST_TOKEN = 5
WARM_UP_ROWS = 16


def make_rows(kind: str, num_rows: int, seed: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Make rows of a kind, with prompts of their own."""
    rng = random.Random(seed)
    rows = []
    for number in range(num_rows):
        asked = KINDS[kind] if "every fifth" not in kind or number % 5 == 0 else {}
        prompt = [rng.randrange(FIRST_TOKEN, options.vocab) for _ in range(rng.randrange(50, 400))]
        rows.append({"prompt_token_ids": prompt, "sampling": {**PLAIN, **asked, "max_tokens": options.tokens}})
    return rows


def answer(llm: LLM, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Answer rows, and return the output tokens per second."""
    started = time.perf_counter()
    answers: list[dict[str, Any]] = list(llm.generate(rows))
    seconds = time.perf_counter() - started
    faults = [each["error"] for each in answers if each["error"] is not None]
    if faults:
        raise SystemExit(f"{len(faults)} rows have errors; the first: {faults[0]}")
    return {"tokens/s": sum(each["usage"]["completion_tokens"] for each in answers) / seconds}


def cases(options: argparse.Namespace, stack: ExitStack) -> Iterator[Case]:
    llm = stack.enter_context(LLM(options.model, max_num_seqs=options.max_num_seqs, job={"plan": False}))

    def measure(kind: str, number: int) -> dict[str, float]:
        return answer(llm, make_rows(kind, options.rows, f"{kind} {number}", options))

    for kind in KINDS:
        warm_up = partial(answer, llm, make_rows(kind, WARM_UP_ROWS, f"{kind} before", options))
        yield Case(kind, partial(measure, kind), warm_up)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=600, help="prompts are of the tokens below this one")


if __name__ == "__main__":
    run_benchmark(__doc__, cases, add_options, repeat=2, compared="tokens/s")
