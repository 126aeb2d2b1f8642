"""MLPConfig: a gated MLP, which `models/layers.py` computes, and PlainMLPConfig: one without a gate, which
`models/plain_mlp.py` computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from nvcli.core.config_types import KeptWeights
from nvcli.kernels.elementwise_settings import XIELU_NUMBERS, PlainActivation
from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.models.mixers.mixer import FeedForward, LayerContext, Piece, Ranks, code_elements
from nvcli.models.tensor_spec import FUSED, Sharding, TensorSpec, vector

HIDDEN_NORM = "ffn_sub_norm"
"""The name of the norm of what the last projection reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMLP(FeedForward):
    """An MLP that every token takes: down(hidden), where `inputs` are the projections of x."""

    name: ClassVar[str] = "mlp"
    inputs: ClassVar[tuple[str, ...]]
    """Ranks hold them as one weight."""
    intermediate_size: int
    bias: bool = False

    def check(self, ranks: Ranks) -> Iterator[str]:
        if self.intermediate_size % ranks.size:
            yield f"intermediate size {self.intermediate_size} does not divide by {ranks.size}"

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        size = self.intermediate_size // ranks.size
        yield Piece(f"{', '.join(self.inputs)} and down_proj", size, "down_proj", len(self.inputs) * size)

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        """Count the elements. One kernel multiplies gate and up and applies the activation, except with quantised
        weights and many tokens."""
        size = self.intermediate_size // ranks.size
        projected = size if quantization == "none" else len(self.inputs) * size
        return 2 * hidden_size + projected + (code_elements(size) if quantization == "fp8" else 0)

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        size, bias = self.intermediate_size, self.bias
        for name in self.inputs:
            yield from context.input_projection(f"{path}.{name}", size, "MLP", self.inputs, bias=bias)
        yield from context.output_projection(f"{path}.down_proj", size, "MLP", bias=bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig(DenseMLP):
    """A gated MLP: down(activation(gate(x)) × up(x))."""

    module: ClassVar[str] = "nvcli.models.layers:GatedMLP"
    launch_seconds: ClassVar[float] = 0.65e-3
    """Measured on an H200 machine, torch 2.11."""
    inputs: ClassVar[tuple[str, ...]] = FUSED["gate_up_proj"]
    activation: ExpertActivation
    norms_hidden: bool = False
    """Whether what the last projection reads is normed."""

    def num_kernels(self, ranks: Ranks) -> int:
        return DenseMLP.num_kernels(self, ranks) + self.activation.clamps + self.norms_hidden

    @property
    def batch_dependence(self) -> str | None:
        return "norms inside of MLPs that may round otherwise in other batches" if self.norms_hidden else None

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        yield from DenseMLP.tensors(self, path, context)
        if self.norms_hidden and context.norm.has_weight:
            norm = context.norm_weight(f"{path}.{HIDDEN_NORM}", self.intermediate_size, "MLP")
            yield replace(norm, sharding=Sharding.ROWS)

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        """Count the elements, beside those of gate and up where a kernel of their own clamps them."""
        apart = self.activation.clamps * 2 * self.intermediate_size // ranks.size
        return DenseMLP.activation_elements(self, hidden_size, ranks, quantization) + apart


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMLPConfig(DenseMLP):
    """An MLP without a gate: down(activation(up(x)))."""

    module: ClassVar[str] = "nvcli.models.plain_mlp:PlainMLP"
    inputs: ClassVar[tuple[str, ...]] = ("up_proj",)
    activation: PlainActivation

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        """Yield the tensors. The numbers of an activation are kept in float32, in which it is computed."""
        yield from DenseMLP.tensors(self, path, context)
        for name in XIELU_NUMBERS if self.activation == "xielu" else ():
            yield vector(f"{path}.act_fn.{name}", 1, Sharding.REPLICATED, "MLP")
