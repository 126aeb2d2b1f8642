"""KimiDeltaConfig: Kimi Delta Attention (https://arxiv.org/abs/2510.26692). `models/kimi_delta.py` computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nvcli.attention.spec import StateSpec
from nvcli.core.config_types import KeptWeights
from nvcli.models.mixers.mixer import LayerContext, Piece, Ranks, RecurrentMixer
from nvcli.models.tensor_spec import FUSED, Sharding, TensorSpec, matrix, vector

CONVOLUTIONS = FUSED["qkv_conv1d"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaConfig(RecurrentMixer):
    """A gated delta net that decays each row of a state by a number of its own, in place of attention. Its decays and
    its output gates are each made by a matrix, or by a pair of matrices of low rank."""

    name: ClassVar[str] = "self_attn"
    module: ClassVar[str] = "nvcli.models.kimi_delta:KimiDeltaAttention"
    divided: ClassVar[tuple[str, str]] = ("num_heads", "heads of linear attention")
    num_heads: int
    head_dim: int
    """The size of each head's query, key and value, and the rank of pairs of matrices."""
    conv_taps: int
    """The number of tokens that the convolution reads: the token itself, and those right before it."""
    has_whole_gates: bool = False
    """Whether decays and gates are each made by one matrix."""
    lowest_decay: float | None = None
    """See `RecurrentHeads`."""

    @property
    def size(self) -> int:
        """The size of all keys of a token, of its queries and of its values."""
        return self.num_heads * self.head_dim

    def kv_spec(self, tensor_parallel_size: int = 1, kv_group: int = 0) -> StateSpec:
        return StateSpec(
            conv_shape=(self.conv_taps - 1, 3 * self.size // tensor_parallel_size),
            recurrent_shape=(self.num_heads // tensor_parallel_size, self.head_dim, self.head_dim),
            num_decays=self.head_dim,
            kv_group=kv_group,
        )

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        yield Piece("o_proj", self.size // ranks.size, "o_proj")

    def num_kernels(self, ranks: Ranks) -> int:
        return 6 if self.has_whole_gates else 8

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        """Count the elements: queries, keys and values before the convolution and after it; decays, gates, results
        before and after their norm; and what chunks keep of keys and scores."""
        return 3 * hidden_size + 2 * self.head_dim + 12 * self.size // ranks.size

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        """Yield the tensors. The parameters of the decay are kept in float32, in which it is computed. The input
        projection fuses the small projections for the gates with the others, and is never quantised."""
        hidden, dtype, size, rank = context.hidden_size, context.dtype, self.size, self.head_dim
        for name in ("q_proj", "k_proj", "v_proj"):
            yield from context.input_projection(f"{path}.{name}", size, "attention")
        for name in CONVOLUTIONS:
            yield matrix(f"{path}.{name}", (size, 1, self.conv_taps), Sharding.ROWS, dtype, "attention")
        for gate in "fg" if self.has_whole_gates else "":
            yield from context.input_projection(f"{path}.{gate}_proj", size, "attention")
        for gate in "" if self.has_whole_gates else "fg":
            yield matrix(f"{path}.{gate}_a_proj", (rank, hidden), Sharding.REPLICATED, dtype, "attention")
            yield matrix(f"{path}.{gate}_b_proj", (size, rank), Sharding.ROWS, dtype, "attention")
        yield from context.input_projection(f"{path}.b_proj", self.num_heads, "attention")
        yield vector(f"{path}.A_log", self.num_heads, Sharding.ROWS, "attention")
        yield vector(f"{path}.dt_bias", size, Sharding.ROWS, "attention")
        yield context.norm_weight(f"{path}.o_norm", self.head_dim, "attention", weight_offset=0.0)
        yield from context.output_projection(f"{path}.o_proj", size, "attention")
