"""Gives an LLM rows of a Python program that hold hostile objects, and sees that each costs its own answer alone.

    python scripts/fuzz_python_rows.py --rows 100000

Rows of every form get objects put into them that no line of a file can hold: halves of characters, objects that hold
themselves or raise whatever they are asked, functions, deep nesting, huge numbers, sets, bytes, numpy's values and
subclasses. They go through one LLM with an engine that does nothing, in calls of both orders. Each row must have one
answer, in order where that is asked for; every tenth row is good and must be answered.
"""

from __future__ import annotations

import copy
import datetime
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from fuzz_rows import CheckingEngine
from fuzzing import load_data, make_parser, print_counts
from nvcli.core.config import RunConfig
from nvcli.demo import demo_path
from nvcli.llm.llm import LLM

GOOD_EVERY = 10
MAX_CALL_ROWS = 200
FORMS: list[Any] = load_data("objects")["forms"]


class Text(str):
    """A text of a class of the program's."""


class Table(dict[str, Any]):
    """A dict of a class of the program's."""


class Rude:
    """An object that raises whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise LookupError(name)

    def __str__(self) -> str:
        raise LookupError("str")

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        raise LookupError("eq")

    def __hash__(self) -> int:
        return 1


def hostile(rng: random.Random) -> Any:
    """Return an object that some row holds by mistake or on purpose."""
    loop: list[Any] = [{"a": 1}]
    loop.append(loop)
    deep: Any = 1
    for _ in range(rng.choice([5, 390, 401, 999, 5000])):
        deep = {"a": deep} if rng.random() < 0.5 else [deep]
    plain = ["a\ud800", Text("x"), Text("\udc00"), 10**5000, -(2**70), math.nan, -math.inf, None, True, 1.5, "", {}, []]
    objects = [
        object(),
        len,
        Rude(),
        Rude,
        b"x",
        memoryview(b"x"),
        {1},
        range(3),
        Table(a=1),
        iter([1]),
        msgspec.Raw(b"["),
    ]
    numpys = [np.float32(1.5), np.int64(3), np.array([[1, 2]]), np.array([object()]), np.str_("x"), np.bool_(True)]
    others = [loop, deep, datetime.date(2026, 1, 2), {(1, 2): 3}, {3: 4}, {"\ud800": 1}, {None: 1}]
    return rng.choice([*plain, *objects, *numpys, *others])


def mutated(row: Any, rng: random.Random) -> Any:
    """Return a row with hostile objects in one to three of its places, or in its own."""
    row = copy.deepcopy(row)
    if rng.random() < 0.03:
        return hostile(rng)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        holder = row
        while isinstance(holder, dict | list) and holder:
            key = rng.choice([*holder] if isinstance(holder, dict) else range(len(holder)))
            inner = holder[key]
            if rng.random() < 0.4 or not isinstance(inner, dict | list):
                if isinstance(holder, dict) and rng.random() < 0.15:
                    key = rng.choice(["\ud800", 3, (1,), "new"])
                holder[key] = hostile(rng)
                break
            holder = inner
    return row


def rows_of(count: int, rng: random.Random) -> Iterator[Any]:
    for number in range(count):
        yield "good" if number % GOOD_EVERY == 0 else mutated(rng.choice(FORMS), rng)


def fuzz(num_rows: int, seed: int) -> Counter[str]:
    """Answer about so many rows, and count the types of their errors; `answered` counts rows without one.

    Raises AssertionError, or what ended the LLM.
    """
    rng = random.Random(seed)
    run = RunConfig(model=str(demo_path()), device="cpu", max_model_len=200, max_num_seqs=64)
    counts: Counter[str] = Counter()
    with LLM.from_config(run, start=CheckingEngine, note=lambda line: None) as llm:
        while counts.total() < num_rows:
            count, order = rng.randrange(1, MAX_CALL_ROWS), rng.choice(["input", "completion"])
            method = rng.choice([llm.generate, llm.generate, llm.chat])
            answers = list(method(rows_of(count, rng), order=order))
            indices = [answer.index for answer in answers]
            assert (indices if order == "input" else sorted(indices)) == list(range(count))
            for answer in answers:
                error = answer.error
                assert error is None or answer.index % GOOD_EVERY, f"a good row: {error}"
                assert error is None or error.type != "internal_error", error
                counts["answered" if error is None else error.type] += 1
    return counts


def main() -> None:
    options = make_parser(__doc__, "--rows", 100_000).parse_args()
    started = time.monotonic()
    print_counts(fuzz(options.rows, options.seed), started)


if __name__ == "__main__":
    main()
