"""SparseMLPConfig: a gated MLP of whose gates the highest ones alone count. `models/sparse_mlp.py` computes it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from nvcli.core.config_types import KeptWeights
from nvcli.models.mixers.mixer import Ranks
from nvcli.models.mixers.mlp import MLPConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMLPConfig(MLPConfig):
    """A gated MLP: down(activation(relu(gate(x) - cut)) × up(x)), where `cut` is so many standard deviations above the
    mean of a token's gates that of normally distributed ones the share `sparsity` would be below."""

    module: ClassVar[str] = "nvcli.models.sparse_mlp:SparseMLP"
    sparsity: float

    @property
    def deviations(self) -> float:
        """The number of standard deviations."""
        return NormalDist().inv_cdf(self.sparsity)

    def num_kernels(self, ranks: Ranks) -> int:
        return MLPConfig.num_kernels(self, ranks) + 1

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        """Count the elements, beside gate and up, which no kernel multiplies with the activation."""
        apart = 2 * self.intermediate_size // ranks.size
        return MLPConfig.activation_elements(self, hidden_size, ranks, quantization) + apart
