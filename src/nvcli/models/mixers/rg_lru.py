"""RgLruConfig: the real-gated linear recurrent unit of Griffin (https://arxiv.org/abs/2402.19427). `models/rg_lru.py`
computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from nvcli.attention.spec import StateSpec
from nvcli.core.config_types import KeptWeights
from nvcli.models.mixers.mixer import ConvolvedMixer, LayerContext, Piece, Ranks
from nvcli.models.tensor_spec import Sharding, TensorSpec, vector

FUSED_INPUTS = ("y_proj", "x_proj")
"""The projections of the input: to what multiplies the results, and to the values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RgLruConfig(ConvolvedMixer):
    """A linear recurrence of single channels in place of attention: each keeps one number, which decays by a gate of
    the token, and to which the token's value is added through another. Heads have gates of their own."""

    name: ClassVar[str] = "recurrent"
    module: ClassVar[str] = "nvcli.models.rg_lru:RgLru"
    divided: ClassVar[tuple[str, str]] = ("num_heads", "heads of recurrent layers")
    num_heads: int
    head_dim: int
    """The channels of a head."""

    @property
    def num_channels(self) -> int:
        return self.num_heads * self.head_dim

    def kv_spec(self, tensor_parallel_size: int = 1, kv_group: int = 0) -> StateSpec:
        return self.channel_spec(self.num_channels // tensor_parallel_size, 1, kv_group)

    def num_kernels(self, ranks: Ranks) -> int:
        return 20

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        size = self.num_channels // ranks.size
        yield Piece("linear_y, linear_x and linear_out", size, "linear_out", 2 * size)

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        """Count the elements; what gates are computed in is float32."""
        return 3 * hidden_size + 12 * self.num_channels // ranks.size

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        dtype, size = context.dtype, self.num_channels
        for name in FUSED_INPUTS:
            yield from context.input_projection(f"{path}.{name}", size, "attention", FUSED_INPUTS, bias=True)
        yield from self.convolution(f"{path}.conv1d", size, context, bias=True)
        yield vector(f"{path}.recurrent_param", size, Sharding.ROWS, "attention")
        heads = vector("", self.num_heads, Sharding.ROWS, "attention", dtype)
        for gate in ("input_gate", "recurrent_gate"):
            shape = self.num_heads, self.head_dim, self.head_dim
            yield replace(heads, name=f"{path}.{gate}_weight", shape=shape, in_linear_layer=False)
            yield replace(heads, name=f"{path}.{gate}_bias", shape=shape[:2], in_linear_layer=False)
        yield from context.output_projection(f"{path}.out_proj", size, "attention", bias=True)
