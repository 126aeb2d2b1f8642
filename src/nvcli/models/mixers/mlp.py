"""MLPConfig: a gated MLP. `models/layers.py` computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from nvcli.core.config_types import KeptWeights
from nvcli.models.mixers.mixer import FeedForward, LayerContext, Piece, Ranks, code_elements
from nvcli.models.tensor_spec import FUSED, Sharding, TensorSpec, matrix, with_bias

Activation = Literal["silu", "gelu_tanh"]
"""The activation function on the gate of a gated MLP; `gelu_tanh` is GELU in its tanh approximation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig(FeedForward):
    """A gated MLP: down(activation(gate(x)) × up(x))."""

    name: ClassVar[str] = "mlp"
    module: ClassVar[str] = "nvcli.models.layers:GatedMLP"
    launch_seconds: ClassVar[float] = 0.65e-3
    """Measured on an H200 machine, torch 2.11."""
    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False

    def check(self, ranks: Ranks) -> Iterator[str]:
        if self.intermediate_size % ranks.size:
            yield f"intermediate size {self.intermediate_size} does not divide by {ranks.size}"

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        size = self.intermediate_size // ranks.size
        yield Piece("gate_proj, up_proj and down_proj", size, "down_proj", 2 * size)

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        """Count the elements. One kernel multiplies gate and up and applies the activation, except with quantised
        weights and many tokens."""
        size = self.intermediate_size // ranks.size
        gate_up = size if quantization == "none" else 2 * size
        return 2 * hidden_size + gate_up + (code_elements(size) if quantization == "fp8" else 0)

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        size, hidden, dtype, fused = self.intermediate_size, context.hidden_size, context.dtype, FUSED["gate_up_proj"]
        for name in fused:
            weight = matrix(f"{path}.{name}", (size, hidden), Sharding.ROWS, dtype, "MLP", fused)
            yield from with_bias(weight, bias=self.bias)
        down_proj = matrix(f"{path}.down_proj", (hidden, size), Sharding.COLUMNS, dtype, "MLP", ("down_proj",))
        yield from with_bias(down_proj, bias=self.bias)
