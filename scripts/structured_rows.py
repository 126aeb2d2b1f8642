"""Answer rows under many different JSON schemas, and check that every answer parses and that its schema allows it.

usage: structured_rows.py [--rows 2000] [--schemas 200] [--tokens N] [--model demo] [--seed 0] [--max-num-seqs 256]
                          [--tp 1]

The rows are questions for the built-in model, which knows nothing of JSON: what it writes follows from the schema
alone. The same rows are then answered without schemas, in the same order and each with as many tokens, and both speeds
are shown; the first schema of a run also loads llguidance, so a short run comes before. Exits with 1 if an answer is
wrong. Answers that `max_tokens` cut are counted, and are not checked. With `--tokens` the schemas are of lists that
never end, so that every answer has so many tokens: that is for speed alone. Without it, `jsonschema` is needed.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nvcli import LLM
from nvcli.core.sampling_params import MAX_BIASED_TOKENS
from nvcli.demo import demo_path
from schema_maker import make_endless_schemas, make_schemas

MAX_TOKENS = 800


def blank_tokens(model: str) -> dict[str, float]:
    """Return a bias against the tokens of blanks, of which the built-in model would write as many as it may."""
    folder = demo_path() if model == "demo" else Path(model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    blanks = [token for token in range(tokenizer.get_vocab_size()) if tokenizer.decode([token]).isspace()]
    return {str(token): -30.0 for token in blanks[:MAX_BIASED_TOKENS]}


def make_rows(
    num_rows: int,
    schemas: Sequence[dict[str, Any]],
    *,
    biases: dict[str, float] | None = None,
    num_tokens: int | None = None,
) -> list[dict[str, Any]]:
    """Make rows that take the schemas in turn, greedy and sampled, with and without penalties, and with these biases.

    With `num_tokens` all are sampled alike and without biases, and answers have so many tokens.
    """
    samplings = ({"temperature": 0}, {}, {"temperature": 1.5, "top_k": 40}, {"presence_penalty": 0.5}, {"top_p": 0.9})
    return [
        {
            "prompt": f"What is {number} + {number % 7}?\n",
            "sampling": {
                "max_tokens": num_tokens or MAX_TOKENS,
                "structured": {"json_schema": schemas[number % len(schemas)]},
                **({"temperature": 1.0} if num_tokens else samplings[number // len(schemas) % len(samplings)]),
                **({"logit_bias": biases} if biases and not num_tokens else {}),
            },
        }
        for number in range(num_rows)
    ]


def describe_fault(answer: dict[str, Any], schema: dict[str, Any]) -> str:
    """Say what is wrong with an answer; empty if it parses and the schema allows it, or if it was cut."""
    if answer["error"] is not None:
        return f"error {answer['error']['type']}: {answer['error']['message']}"
    choice = answer["choices"][0]
    if choice["finish_reason"] == "length":
        return ""
    import jsonschema

    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(choice["text"]))
    except ValueError as error:
        return f"no JSON: {error}: {choice['text']!r}"
    except jsonschema.ValidationError as error:
        return f"not allowed: {error.message}: {choice['text']!r}"
    return ""


def answer(llm: LLM, rows: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], int, float]:
    """Return the answers in the order of the rows, the number of their tokens, and the seconds that they took."""
    started = time.perf_counter()
    answers: list[dict[str, Any]] = list(llm.generate(rows, order="input"))
    seconds = time.perf_counter() - started
    return answers, sum(each["usage"]["completion_tokens"] for each in answers), seconds


def free_row(row: dict[str, Any], num_tokens: int) -> dict[str, Any]:
    """Return a row without its schema, whose answer has so many tokens."""
    sampling = {key: value for key, value in row["sampling"].items() if key != "structured"}
    return {**row, "sampling": {**sampling, "max_tokens": num_tokens or 1, "ignore_eos": True}}


def report(answers: Sequence[dict[str, Any]], schemas: Sequence[dict[str, Any]]) -> int:
    """Print how many answers are wrong, and the first of them; return their number."""
    faults = [
        (number, fault)
        for number, each in enumerate(answers)
        if (fault := describe_fault(each, schemas[number % len(schemas)]))
    ]
    reasons = collections.Counter(each["choices"][0]["finish_reason"] for each in answers if each["error"] is None)
    print(f"{len(answers):,} rows under {len(schemas):,} schemas: {len(faults)} wrong; ended by {dict(reasons)}")
    for number, fault in faults[:10]:
        print(f"  row {number}: {fault}")
    return len(faults)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()
    make = make_endless_schemas if options.tokens else make_schemas
    schemas = make(options.schemas, seed=options.seed)
    biases = None if options.tokens else blank_tokens(options.model)
    rows = make_rows(options.rows, schemas, biases=biases, num_tokens=options.tokens)
    # Only of the free rows the lengths are known: planned by them, they would have no long answers at their end.
    job = {"plan": False}
    with LLM(options.model, max_num_seqs=options.max_num_seqs, tensor_parallel_size=options.tp, job=job) as llm:
        answer(llm, rows[:8])
        answers, num_tokens, seconds = answer(llm, rows)
        num_wrong = report(answers, schemas)
        free = [free_row(row, each["usage"]["completion_tokens"]) for row, each in zip(rows, answers, strict=True)]
        _, num_free_tokens, free_seconds = answer(llm, free)
    speed, free_speed = num_tokens / seconds, num_free_tokens / free_seconds
    print(f"{speed:,.0f} tokens/s constrained, {free_speed:,.0f} free: {speed / free_speed:.0%}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
