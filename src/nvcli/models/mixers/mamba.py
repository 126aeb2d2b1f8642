"""MambaConfig: the selective state space of Mamba-2 (https://arxiv.org/abs/2405.21060), and Mamba1Config: that of
Mamba-1 (https://arxiv.org/abs/2312.00752). `models/mamba.py` computes both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from nvcli.attention.spec import StateSpec
from nvcli.core.config_types import KeptWeights
from nvcli.kernels.recurrent_chunks import CHUNK
from nvcli.models.mixers.mixer import ConvolvedMixer, LayerContext, Piece, Ranks
from nvcli.models.tensor_spec import FUSED, Sharding, StoredDtype, TensorSpec, matrix, vector

ResultNorm = Literal["after gate", "before gate"]
"""The place of the result's norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(ConvolvedMixer):
    """A selective state space in place of attention: it keeps a state of fixed size, and no keys and values.

    In the terms of attention, B is a token's key, C its query and x its value. Heads of one group share keys and
    queries.
    """

    name: ClassVar[str] = "mamba"
    module: ClassVar[str] = "nvcli.models.mamba:Mamba"
    num_products: ClassVar[int] = 2
    num_heads: int
    head_dim: int
    num_groups: int
    """It divides `num_heads`."""
    state_size: int
    """The size of keys and queries."""
    norm_eps: float
    """Added to mean squares in the norm of the result, which is over the heads of a group."""
    norm: ResultNorm | None = "after gate"
    """Whether the result is normed after or before its gate; None: it is gated alone."""
    conv_bias: bool = True
    bias: bool = False
    """Whether the projections have biases."""

    @property
    def inner_size(self) -> int:
        """The size of all values of a token."""
        return self.num_heads * self.head_dim

    def groups_per_rank(self, tensor_parallel_size: int) -> int:
        """Return the number of groups of each rank. With fewer groups than ranks, neighbouring ranks hold the same
        one."""
        return max(1, self.num_groups // tensor_parallel_size)

    def channels_per_rank(self, tensor_parallel_size: int) -> int:
        """Return the number of channels of a rank's convolution: its queries, keys and values."""
        keys = self.groups_per_rank(tensor_parallel_size) * self.state_size
        return 2 * keys + self.inner_size // tensor_parallel_size

    def kv_spec(self, tensor_parallel_size: int = 1, kv_group: int = 0) -> StateSpec:
        return StateSpec(
            conv_shape=(self.conv_taps - 1, self.channels_per_rank(tensor_parallel_size)),
            recurrent_shape=(self.num_heads // tensor_parallel_size, self.state_size, self.head_dim),
            has_unit_keys=False,
            kv_group=kv_group,
        )

    def num_kernels(self, ranks: Ranks) -> int:
        """Return the number of kernels. Ranks that share a group norm its result step by step, with a sum between."""
        return 22 if self.norm is not None and self.num_groups < ranks.size else 6

    def check(self, ranks: Ranks) -> Iterator[str]:
        size, groups = ranks.size, self.num_groups
        if self.num_heads % size:
            yield f"{self.num_heads} heads of Mamba layers do not divide by {size}"
        elif groups % size and size % groups:
            yield f"{groups} groups of Mamba layers neither divide by {size} nor divide it"

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        yield Piece("out_proj", self.inner_size // ranks.size, "out_proj")

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        scores = self.num_heads * max(CHUNK, self.head_dim)
        return 3 * hidden_size + 2 * self.channels_per_rank(ranks.size) + (2 * self.inner_size + scores) // ranks.size

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        """Yield the tensors: the parts of the input projection and of the convolution, which files hold as one, each by
        itself. The parameters of decay, step and skip are kept in float32, in which they are used. The input projection
        fuses the small projection for the step sizes with the others, and is never quantised."""
        hidden, dtype, inner = context.hidden_size, context.dtype, self.inner_size
        keys = self.num_groups * self.state_size
        rows = {"z": inner, "x": inner, "B": keys, "C": keys, "dt": self.num_heads}
        for name in FUSED["in_proj"]:
            yield from self._part(f"{path}.{name}", rows, (hidden,), dtype, bias=self.bias)
        for name in FUSED["conv1d"]:
            yield from self._part(f"{path}.{name}", rows, (1, self.conv_taps), dtype, bias=self.conv_bias)
        for name in ("A_log", "dt_bias", "D"):
            yield vector(f"{path}.{name}", self.num_heads, Sharding.ROWS, "attention")
        if self.norm is not None:
            norm = context.norm_weight(f"{path}.norm", inner, "attention", weight_offset=0.0)
            yield replace(norm, sharding=Sharding.ROWS)
        yield from context.output_projection(f"{path}.out_proj", inner, "attention", bias=self.bias)

    def _part(
        self, name: str, rows: dict[str, int], shape: tuple[int, ...], dtype: StoredDtype, *, bias: bool
    ) -> Iterator[TensorSpec]:
        """Yield a part of a fused weight [rows, *shape], and its bias. `rows` are those of each kind of part, with
        which its name ends."""
        kind = name.rpartition("_")[2]
        weight = matrix(name, (rows[kind], *shape), Sharding.ROWS, dtype, "attention")
        weight = replace(weight, max_shards=self.num_groups if kind in ("B", "C") else None)
        yield weight
        if bias:
            yield replace(weight, name=f"{name}.bias", shape=weight.shape[:1])


NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")
"""The norms of the numbers that step sizes are made of, of keys, and of queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Config(ConvolvedMixer):
    """A selective state space of single channels in place of attention: it keeps a state of fixed size, and no keys and
    values.

    In the terms of attention, B is a token's key, C its query and x its value. All channels share keys and queries,
    which are projections of all values: ranks, which have channels each, add up their parts of them.
    """

    name: ClassVar[str] = "mamba"
    module: ClassVar[str] = "nvcli.models.mamba:Mamba1"
    divided: ClassVar[tuple[str, str]] = ("num_channels", "channels of Mamba layers")
    num_channels: int
    state_size: int
    """The size of keys and queries."""
    step_rank: int
    """The size of what the step sizes of all channels are projected from."""
    norm_eps: float | None = None
    """Added to mean squares in the norms of step sizes, keys and queries; None: these are not normed."""
    norm_has_weight: bool = True
    conv_bias: bool = True
    bias: bool = False
    """Whether the projections of the input and of the result have biases."""

    @property
    def shared_sizes(self) -> tuple[int, int, int]:
        """The sizes of what step sizes are projected from, of keys and of queries."""
        return self.step_rank, self.state_size, self.state_size

    def kv_spec(self, tensor_parallel_size: int = 1, kv_group: int = 0) -> StateSpec:
        return self.channel_spec(self.num_channels // tensor_parallel_size, self.state_size, kv_group)

    def num_kernels(self, ranks: Ranks) -> int:
        return 8 + (ranks.size > 1) + (self.norm_eps is not None)

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        size = self.num_channels // ranks.size
        yield Piece("in_proj and out_proj", size, "out_proj", 2 * size)

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        return 3 * hidden_size + 2 * sum(self.shared_sizes) + 5 * self.num_channels // ranks.size

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        """Yield the tensors. The parameters of rates, step sizes and skips are kept in float32, in which they are used;
        so the bias of `dt_proj` is not the projection's."""
        dtype, size, fused = context.dtype, self.num_channels, FUSED["xz_proj"]
        for name in fused:
            yield from context.input_projection(f"{path}.{name}", size, "attention", fused, bias=self.bias)
        yield from self.convolution(f"{path}.conv1d", size, context, bias=self.conv_bias)
        yield matrix(f"{path}.x_proj", (sum(self.shared_sizes), size), Sharding.COLUMNS, dtype, "attention")
        yield matrix(f"{path}.dt_proj", (size, self.step_rank), Sharding.ROWS, dtype, "attention")
        of_channels = vector(f"{path}.dt_bias", size, Sharding.ROWS, "attention")
        yield of_channels
        yield replace(of_channels, name=f"{path}.D")
        yield replace(of_channels, name=f"{path}.A_log", shape=(size, self.state_size), in_linear_layer=False)
        if self.norm_eps is not None and self.norm_has_weight:
            for name, length in zip(NORMS, self.shared_sizes, strict=True):
                yield context.norm_weight(f"{path}.{name}", length, "attention", weight_offset=0.0)
        yield from context.output_projection(f"{path}.out_proj", size, "attention", bias=self.bias)
