"""Cases of tests that can be left out: those beyond one for every argument or every two, and those like another."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import pytest


def seeds(count: int) -> list[Any]:
    """Make seeds of random tests, the second half of which run with --all alone."""
    return [*range(count // 2), *map(full, range(count // 2, count))]


def full(case: Any, *, in_parts: bool = False) -> Any:
    """Mark a case that runs with --all alone, as others come near it. `in_parts`: it is several arguments."""
    return pytest.param(*case, marks=pytest.mark.full) if in_parts else pytest.param(case, marks=pytest.mark.full)


def left_out_of(items: Iterable[pytest.Item], size: int) -> set[pytest.Item]:
    """Of each test, the cases whose every `size` arguments, one or two, are together in another case too.

    Cases are kept one after the other, each time the one with the most that no other has, and of those the one whose
    arguments were taken least often, and so always the same ones.
    """
    cases_of: dict[tuple[object, str], dict[pytest.Item, set[object]]] = defaultdict(dict)
    for item in items:
        assert isinstance(item, pytest.Function)
        values = sorted((name, id(value)) for name, value in item.callspec.params.items())
        cases_of[item.parent, item.originalname][item] = set(itertools.combinations(values, min(size, len(values))))
    left_out = set()
    for cases in cases_of.values():
        missing = set().union(*cases.values())
        taken: Counter[object] = Counter()

        def gain(item: pytest.Item) -> tuple[int, int]:
            return len(cases[item] & missing), -sum(taken[each] for each in cases[item])  # noqa: B023

        while missing:
            found = cases.pop(max(cases, key=gain))
            missing -= found
            taken.update(found)
        left_out |= cases.keys()
    return left_out
