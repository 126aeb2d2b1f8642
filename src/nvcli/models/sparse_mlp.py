"""SparseMLP: a gated MLP of whose gates the highest ones alone count (`mixers/sparse_mlp.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.activation import gelu_tanh_above_and_mul, sums_of_gates
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.lora_types import AdapterRows
from nvcli.kernels.weight_formats import FP8Scaling
from nvcli.models.layers import GatedMLP
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.mixers.sparse_mlp import SparseMLPConfig
from nvcli.models.parallel import BuildContext


class SparseMLP(GatedMLP):
    """down(gelu(relu(gate(x) - cut)) × up(x)), sharded as `GatedMLP` is: mean and deviation of a token's gates are
    those of all ranks together."""

    def __init__(self, build: BuildContext, path: str, config: SparseMLPConfig, norm: NormConfig) -> None:
        super().__init__(build, path, config, norm)
        assert config.activation.kind == "gelu_tanh", "no family has another one"
        self.group, self.size = build.group, config.intermediate_size
        dtype = getattr(torch, build.dtype)
        self.deviations = torch.tensor(config.deviations, dtype=dtype, device="cpu").item()  # rounded as published

    def hidden(self, x: Activations, adapters: AdapterRows | None, scaling: FP8Scaling | None = None) -> Tensor:
        """Compute gelu(relu(gate(x) - cut)) × up(x), [T, H] → [T, I]; nothing is quantised."""
        gate_up = self.gate_up_proj(x, adapters)
        sums = self.group.sum_of_squares(sums_of_gates(gate_up))
        return gelu_tanh_above_and_mul(gate_up, sums, self.size, self.deviations)
