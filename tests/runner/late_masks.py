"""Masks that are late on purpose, and a count of the rows that steps left out because of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nvcli.grammars import Vocabulary
from nvcli.runner import mask_maker
from nvcli.runner.constraints import Constraints, StepMasks
from nvcli.runner.followed_answer import FollowedAnswer


@dataclass
class LateMasks:
    """What became of the rows of steps."""

    num_held: int = 0
    num_given: int = 0


def make_late(
    monkeypatch: pytest.MonkeyPatch, delay: Callable[[FollowedAnswer], float], *, num_threads: int = 8
) -> LateMasks:
    """Let the masks of answers take longer by so many seconds. `delay` is called on threads that make masks."""
    make, masks_of, found = mask_maker._make, Constraints.masks, LateMasks()

    def make_slowly(group: Sequence[FollowedAnswer], executor: Any, vocabulary: Vocabulary, masks: np.ndarray) -> None:
        time.sleep(max(map(delay, group), default=0.0))
        make(group, executor, vocabulary, masks)

    def count(constraints: Constraints, *arguments: Any) -> StepMasks:
        masks = masks_of(constraints, *arguments)
        found.num_held += int(masks.is_held.sum())
        found.num_given += int((~masks.is_held).sum())
        return masks

    monkeypatch.setattr(mask_maker, "_make", make_slowly)
    monkeypatch.setattr(mask_maker, "_MIN_THREADS", num_threads)
    monkeypatch.setattr(mask_maker, "_LEAST_GROUP", 1)
    monkeypatch.setattr(Constraints, "masks", count)
    return found


def random_delays(seed: int, *, share: float = 0.3, seconds: float = 0.01) -> Callable[[FollowedAnswer], float]:
    """Delay this share of the masks by up to `seconds`."""
    rng = np.random.default_rng(seed)
    return lambda answer: float(rng.random() * seconds) if rng.random() < share else 0.0
