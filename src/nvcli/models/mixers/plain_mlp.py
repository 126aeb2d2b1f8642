"""PlainMLPConfig: an MLP without a gate. `models/plain_mlp.py` computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nvcli.core.config_types import KeptWeights
from nvcli.kernels.elementwise_settings import XIELU_NUMBERS, PlainActivation
from nvcli.models.mixers.mixer import FeedForward, LayerContext, Piece, Ranks, code_elements
from nvcli.models.tensor_spec import Sharding, TensorSpec, matrix, vector, with_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMLPConfig(FeedForward):
    """An MLP without a gate: down(activation(up(x)))."""

    name: ClassVar[str] = "mlp"
    module: ClassVar[str] = "nvcli.models.plain_mlp:PlainMLP"
    intermediate_size: int
    activation: PlainActivation
    bias: bool = False

    def check(self, ranks: Ranks) -> Iterator[str]:
        if self.intermediate_size % ranks.size:
            yield f"intermediate size {self.intermediate_size} does not divide by {ranks.size}"

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        size = self.intermediate_size // ranks.size
        yield Piece("up_proj and down_proj", size, "down_proj", size)

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        size = self.intermediate_size // ranks.size
        return 2 * hidden_size + size + (code_elements(size) if quantization == "fp8" else 0)

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        """Yield the tensors. The numbers of an activation are kept in float32, in which it is computed."""
        size, hidden, dtype = self.intermediate_size, context.hidden_size, context.dtype
        up_proj = matrix(f"{path}.up_proj", (size, hidden), Sharding.ROWS, dtype, "MLP", ("up_proj",))
        yield from with_bias(up_proj, bias=self.bias)
        down_proj = matrix(f"{path}.down_proj", (hidden, size), Sharding.COLUMNS, dtype, "MLP", ("down_proj",))
        yield from with_bias(down_proj, bias=self.bias)
        for name in XIELU_NUMBERS if self.activation == "xielu" else ():
            yield vector(f"{path}.act_fn.{name}", 1, Sharding.REPLICATED, "MLP")
