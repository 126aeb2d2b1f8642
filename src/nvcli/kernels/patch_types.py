"""Types of attention in vision towers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

Runs = tuple[tuple[int, int, int], ...]
"""Runs of segments of one size: (first patch, number of segments, patches of each)."""


class HeadNorms(NamedTuple):
    """RMS norms of heads before attention."""

    queries: Tensor
    """The weight of the queries' norm, [D]."""
    keys: Tensor
    eps: float
    of_values: bool
    """Whether values are normed, too, without a weight."""
