"""Planner and scheduler together, on jobs that `scripts/simulate_scheduling.py` makes: what a plan promises holds."""

from __future__ import annotations

import random

import pytest

from simulate_scheduling import BLOCK_SIZE, Row, simulate

PREFIX_BLOCKS = 6


def grouped_rows() -> list[Row]:
    """40 groups of 12 rows in random order, each with six blocks in common and 20 tokens of their own."""
    rng = random.Random(0)
    rows = [
        Row(
            prompt=[*range(10_000 * group, 10_000 * group + PREFIX_BLOCKS * BLOCK_SIZE), *([rng.randrange(100)] * 20)],
            length=rng.randint(5, 60),
            max_tokens=100,
        )
        for group in range(40)
        for _ in range(12)
    ]
    rng.shuffle(rows)
    return rows


@pytest.mark.parametrize("order", ["completion", "input"])
def test_each_shared_prefix_is_computed_once(order: str) -> None:
    """Though the cache holds no more than about ten of the forty, and groups come in random order."""
    rows = grouped_rows()
    outcome = simulate(rows, seqs=16, kv_tokens=60 * BLOCK_SIZE, order=order)
    # What two rows have in common behind the prefix may be copied from one to the other.
    of_prefixes, computed = 40 * PREFIX_BLOCKS * BLOCK_SIZE, outcome.prompt_tokens - outcome.cached_tokens
    assert of_prefixes + len(rows) * 19 < computed <= of_prefixes + len(rows) * 20
    assert outcome.output_tokens == sum(row.length for row in rows)


def test_reading_shared_keys_once_is_modelled_as_faster() -> None:
    rows = grouped_rows()
    once, each = (simulate(rows, seqs=16, kv_tokens=6400, reads_once=reads_once) for reads_once in (True, False))
    assert once.steps == each.steps
    assert once.seconds < each.seconds
