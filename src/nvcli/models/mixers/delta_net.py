"""DeltaNetConfig: a gated delta net (https://arxiv.org/abs/2412.06464), and KimiDeltaConfig: Kimi Delta Attention
(https://arxiv.org/abs/2510.26692). `models/delta_net.py` computes both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from nvcli.attention.spec import StateSpec
from nvcli.core.config_types import KeptWeights
from nvcli.kernels.elementwise_settings import NormGate
from nvcli.models.mixers.mixer import ConvolvedMixer, LayerContext, Piece, Ranks
from nvcli.models.tensor_spec import FUSED, Sharding, TensorSpec, matrix, vector

StoredProjections = Literal["by head", "qkv", "apart"]
"""How files hold the projections of queries, keys and values: fused key head by key head, as the others are; fused one
above the other; or each by itself, with a convolution of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig(ConvolvedMixer):
    """A gated delta net in place of attention: it keeps a state of fixed size, and no keys and values."""

    name: ClassVar[str] = "linear_attn"
    module: ClassVar[str] = "nvcli.models.delta_net:GatedDeltaNet"
    divided: ClassVar[tuple[str, str]] = ("num_key_heads", "key heads of linear attention")
    num_key_heads: int
    key_dim: int
    num_value_heads: int
    """A multiple of `num_key_heads`; each key head serves equally many value heads."""
    value_dim: int
    stored: StoredProjections = "qkv"
    beta_scale: float = 1.0
    """See `RecurrentHeads`."""
    gate: NormGate = "silu"
    """The function of the gates by which the heads' normed results are multiplied."""
    norm_eps: float | None = None
    """The epsilon of the norm of the heads' results; None: that of the decoder's norms."""

    @property
    def key_size(self) -> int:
        """The size of all keys of a token, and also of its queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """The number of channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def convolutions(self) -> tuple[str, ...]:
        """The names of the convolution's parts: one, or those of queries, keys and values."""
        return ("q_conv1d", "k_conv1d", "v_conv1d") if self.stored == "apart" else ("conv1d",)

    def kv_spec(self, tensor_parallel_size: int = 1, kv_group: int = 0) -> StateSpec:
        return StateSpec(
            conv_shape=(self.conv_taps - 1, self.num_channels // tensor_parallel_size),
            recurrent_shape=(self.num_value_heads // tensor_parallel_size, self.key_dim, self.value_dim),
            kv_group=kv_group,
        )

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        yield Piece("out_proj", self.value_size // ranks.size, "out_proj")

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        return 3 * hidden_size + (2 * self.num_channels + 3 * self.value_size) // ranks.size

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        """Yield the tensors. The parameters of the decay are kept in float32, in which it is computed. The norm of the
        heads has no weight offset, unlike the decoder's norms. The input projection fuses the small projections for the
        decay with the others, and is never quantised."""
        num_heads = self.num_value_heads
        channels = {"qkv": self.num_channels}
        if self.stored == "apart":
            channels = {"q": self.key_size, "k": self.key_size, "v": self.value_size}
        if self.stored == "by head":
            rows = {"in_proj_qkvz": self.num_channels + self.value_size, "in_proj_ba": 2 * num_heads}
        else:
            rows = {f"in_proj_{name}": count for name, count in channels.items()}
            rows |= {"in_proj_z": self.value_size, "in_proj_b": num_heads, "in_proj_a": num_heads}
        for name, count in rows.items():
            yield from context.input_projection(f"{path}.{name}", count, "attention")
        for name, count in zip(self.convolutions, channels.values(), strict=True):
            yield from self.convolution(f"{path}.{name}", count, context)
        for name in ("A_log", "dt_bias"):
            yield vector(f"{path}.{name}", num_heads, Sharding.ROWS, "attention")
        yield context.norm_weight(f"{path}.norm", self.value_dim, "attention", weight_offset=0.0)
        yield from context.output_projection(f"{path}.out_proj", self.value_size, "attention")


CONVOLUTIONS = FUSED["qkv_conv1d"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaConfig(ConvolvedMixer):
    """A gated delta net that decays each row of a state by a number of its own, in place of attention. Its decays and
    its output gates are each made by a matrix, or by a pair of matrices of low rank."""

    name: ClassVar[str] = "self_attn"
    module: ClassVar[str] = "nvcli.models.delta_net:KimiDeltaAttention"
    divided: ClassVar[tuple[str, str]] = ("num_heads", "heads of linear attention")
    num_heads: int
    head_dim: int
    """The size of each head's query, key and value, and the rank of pairs of matrices."""
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
            yield from self.convolution(f"{path}.{name}", size, context)
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
