"""RelativeBias: numbers that tokens add to the scores of near keys, of some of their own and profiles over distances
that all heads share. Shapes: T tokens, N heads of this rank, R numbers of a head, E distances."""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.distance_bias import DistanceBias
from nvcli.models.mixers.attention import PROFILES
from nvcli.models.parallel import BuildContext, TensorShard


class RelativeBias(TensorShard):
    """A token's numbers [T, N × R], times its heads' factors if there are any, weigh the profiles [R, E]."""

    def __init__(self, build: BuildContext, path: str) -> None:
        super().__init__(build, f"{path}.{PROFILES}")

    def forward(self, numbers: Tensor, factors: Tensor | None, positions: Tensor) -> DistanceBias:
        """factors: [T, 1, 1] float32; positions: [T] int32, those of the tokens in their requests."""
        heads = numbers.view(len(numbers), -1, len(self.weight))
        if factors is not None:
            heads = (heads * factors).to(numbers.dtype)
        return DistanceBias(torch.matmul(heads, self.weight), positions)
