"""DistanceBias: numbers that are added to the scores of near keys, as each query's heads say. Plain torch is the
reference of what attention kernels do with them.

Shapes: T tokens, H query heads, E distances.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DistanceBias(NamedTuple):
    """The numbers that each query's heads add to the scaled scores of the keys up to E - 1 tokens before it."""

    values: Tensor
    """[T, H, E], contiguous; the first number is that of the token's own key. Keys further away get nothing."""
    positions: Tensor
    """[T] int32, each token's position in its request."""

    def of(self, tokens: slice) -> DistanceBias:
        """Return the numbers of some of the tokens."""
        return DistanceBias(self.values[tokens], self.positions[tokens])


def bias_of_keys(values: Tensor, distances: Tensor) -> Tensor:
    """Look up what is added to scores: [n, H, E], and the distances from n queries back to m keys, [n, m] or [1, m] →
    [n, H, m], -inf for keys behind the query."""
    extent = values.shape[2]
    places = distances.clamp(0, extent - 1).unsqueeze(1).expand(*values.shape[:2], -1)
    found = values.gather(2, places).masked_fill_((distances >= extent).unsqueeze(1), 0.0)
    return found.masked_fill_((distances < 0).unsqueeze(1), -torch.inf)
