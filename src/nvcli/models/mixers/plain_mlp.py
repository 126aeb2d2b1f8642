"""PlainMLPConfig: an MLP without a gate. `models/plain_mlp.py` computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nvcli.kernels.elementwise_settings import XIELU_NUMBERS, PlainActivation
from nvcli.models.mixers.mixer import LayerContext
from nvcli.models.mixers.mlp import DenseMLP
from nvcli.models.tensor_spec import Sharding, TensorSpec, vector


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
