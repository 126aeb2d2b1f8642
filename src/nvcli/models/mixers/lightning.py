"""LightningConfig: linear attention in which each head forgets at a fixed rate (lightning attention,
https://arxiv.org/abs/2401.04658). `models/lightning.py` computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from nvcli.attention.spec import StateSpec
from nvcli.core.config_types import KeptWeights
from nvcli.kernels.recurrent_chunks import CHUNK
from nvcli.models.mixers.mixer import LayerContext, Piece, Ranks, RecurrentMixer
from nvcli.models.tensor_spec import FUSED, Sharding, TensorSpec

PROJECTIONS = (*FUSED["qkv_proj"], "output_gate")
"""The projections of a layer's input, which ranks fuse; files have the first three as one, head by head."""
_TABLES = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Tensors of files that follow from the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningConfig(RecurrentMixer):
    """Lightning attention: it keeps a state of fixed size, and no keys and values."""

    name: ClassVar[str] = "self_attn"
    module: ClassVar[str] = "nvcli.models.lightning:LightningAttention"
    divided: ClassVar[tuple[str, str]] = ("num_heads", "heads of lightning attention")
    num_products: ClassVar[int] = 2
    num_heads: int
    head_dim: int
    """The size of queries, keys and values."""
    rate_factor: float
    """The factor of all rates in this layer."""
    norm_eps: float = 1e-6
    """Added to the mean square in the norm of the result, which is over all heads."""

    @property
    def inner_size(self) -> int:
        """The size of all values of a token."""
        return self.num_heads * self.head_dim

    @property
    def rates(self) -> tuple[float, ...]:
        """The rate of each head: a token multiplies its state by exp(-rate)."""
        return tuple(self.rate_factor * 2 ** (-8 * (head + 1) / self.num_heads) for head in range(self.num_heads))

    def kv_spec(self, tensor_parallel_size: int = 1, kv_group: int = 0) -> StateSpec:
        return StateSpec(
            conv_shape=(0, 0),
            recurrent_shape=(self.num_heads // tensor_parallel_size, self.head_dim, self.head_dim),
            has_unit_keys=False,
            kv_group=kv_group,
        )

    def num_kernels(self, ranks: Ranks) -> int:
        """Return the number of kernels. Several ranks norm the result in two, with a sum between."""
        return 8 if ranks.size == 1 else 10

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        size = self.inner_size // ranks.size
        yield Piece("qkv_proj, output_gate and out_proj", size, "out_proj", len(PROJECTIONS) * size)

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        scores = self.num_heads * max(CHUNK, self.head_dim)
        return 3 * hidden_size + (6 * self.inner_size + scores) // ranks.size

    def unused_tensors(self, path: str) -> Iterator[str]:
        return (f"{path}.{name}" for name in _TABLES)

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        for name in PROJECTIONS:
            yield from context.input_projection(f"{path}.{name}", self.inner_size, "attention", PROJECTIONS)
        norm = context.norm_weight(f"{path}.norm", self.inner_size, "attention", weight_offset=0.0)
        yield replace(norm, sharding=Sharding.ROWS)
        yield from context.output_projection(f"{path}.out_proj", self.inner_size, "attention")
