"""Ranks in this process whose masks are late, and a count of the rows that steps left out because of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from late_worker import LateMasks, make_late
from nvcli.runner import constraints, mask_workers
from nvcli.runner.constraints import Constraints, StepMasks


@dataclass
class RowCount:
    """What became of the constrained rows of steps."""

    num_held: int = 0
    num_given: int = 0


def use_late_masks(monkeypatch: pytest.MonkeyPatch, late: LateMasks) -> RowCount:
    """Make masks late in all ranks that are made from now on, to the end of the test."""
    monkeypatch.setattr(mask_workers, "_MODULE", mask_workers._MODULE)
    monkeypatch.setattr(constraints, "_MIN_WORKERS", constraints._MIN_WORKERS)
    for name, value in make_late(late).items():
        monkeypatch.setenv(name, value)
    masks_of, found = Constraints.masks, RowCount()

    def count(self: Constraints, *arguments: Any) -> StepMasks:
        masks = masks_of(self, *arguments)
        found.num_held += int(masks.is_held.sum())
        found.num_given += int((~masks.is_held).sum())
        return masks

    monkeypatch.setattr(Constraints, "masks", count)
    return found
