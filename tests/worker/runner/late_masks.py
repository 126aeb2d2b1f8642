"""Ranks in this process whose masks are late, and a count of the rows that steps left out because of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from late_worker import LateMasks, make_late
from nvcli.worker.masks import mask_workers
from nvcli.worker.runner import constraints
from nvcli.worker.runner.constraints import Constraints


@dataclass
class RowCount:
    """What became of the constrained rows of steps."""

    num_held: int = 0
    num_given: int = 0


def use_late_masks(monkeypatch: pytest.MonkeyPatch, late: LateMasks, *, num_workers: int = 3) -> RowCount:
    """Make masks late in all ranks that are made from now on, to the end of the test."""
    monkeypatch.setattr(mask_workers, "_MODULE", mask_workers._MODULE)
    monkeypatch.setattr(constraints, "_MIN_WORKERS", constraints._MIN_WORKERS)
    for name, value in make_late(late, num_workers=num_workers).items():
        monkeypatch.setenv(name, value)
    take, found = Constraints._take, RowCount()

    def count(self: Constraints, chosen: Any) -> None:
        is_held = chosen.masks.is_held
        found.num_held += int(is_held.sum())
        found.num_given += int((~is_held).sum())
        take(self, chosen)

    monkeypatch.setattr(Constraints, "_take", count)
    return found
