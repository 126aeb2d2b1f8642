"""Mamba1Config: the selective state space of Mamba-1 (https://arxiv.org/abs/2312.00752). `models/mamba1.py` computes
it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from nvcli.attention.spec import StateSpec
from nvcli.core.config_types import KeptWeights
from nvcli.models.mixers.mixer import LayerContext, Piece, Ranks, RecurrentMixer
from nvcli.models.tensor_spec import FUSED, Sharding, TensorSpec, matrix, vector

NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")
"""The norms of the numbers that step sizes are made of, of keys, and of queries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1Config(RecurrentMixer):
    """A selective state space of single channels in place of attention: it keeps a state of fixed size, and no keys and
    values.

    In the terms of attention, B is a token's key, C its query and x its value. All channels share keys and queries,
    which are projections of all values: ranks, which have channels each, add up their parts of them.
    """

    name: ClassVar[str] = "mamba"
    module: ClassVar[str] = "nvcli.models.mamba1:Mamba1"
    divided: ClassVar[tuple[str, str]] = ("num_channels", "channels of Mamba layers")
    num_channels: int
    state_size: int
    """The size of keys and queries."""
    step_rank: int
    """The size of what the step sizes of all channels are projected from."""
    conv_taps: int
    """The number of tokens that the convolution reads: the token itself, and those right before it."""
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
        channels = self.num_channels // tensor_parallel_size
        return StateSpec(
            conv_shape=(self.conv_taps - 1, channels),
            recurrent_shape=(1, self.state_size, channels),
            has_unit_keys=False,
            num_decays=channels,
            has_rates=True,
            kv_group=kv_group,
        )

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
        conv = matrix(f"{path}.conv1d", (size, 1, self.conv_taps), Sharding.ROWS, dtype, "attention")
        yield conv
        if self.conv_bias:
            yield vector(f"{path}.conv1d.bias", size, Sharding.ROWS, "attention", dtype)
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
