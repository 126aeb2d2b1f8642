"""ShortConvConfig: a gated short convolution (LFM2, https://arxiv.org/abs/2511.23404). `models/short_conv.py` computes
it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from nvcli.attention.spec import StateSpec
from nvcli.core.config_types import KeptWeights
from nvcli.models.mixers.mixer import ConvolvedMixer, LayerContext, Piece, Ranks
from nvcli.models.tensor_spec import FUSED, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig(ConvolvedMixer):
    """A short convolution between two gates in place of attention: it keeps its last inputs, and no keys and values."""

    name: ClassVar[str] = "conv"
    module: ClassVar[str] = "nvcli.models.short_conv:ShortConv"
    divided: ClassVar[tuple[str, str]] = ("num_channels", "channels of convolutions")
    num_channels: int
    """The hidden size."""
    bias: bool = False
    """Whether the projections and the convolution have biases."""

    def kv_spec(self, tensor_parallel_size: int = 1, kv_group: int = 0) -> StateSpec:
        channels = self.num_channels // tensor_parallel_size
        return StateSpec(conv_shape=(self.conv_taps - 1, channels), recurrent_shape=(0, 0, 0), kv_group=kv_group)

    def state_flops(self, spec: StateSpec) -> int:
        return 2 * self.conv_taps * spec.conv_shape[1]

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        size = self.num_channels // ranks.size
        yield Piece("in_proj and out_proj", size, "out_proj", 3 * size)

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        return 2 * hidden_size + 6 * self.num_channels // ranks.size

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        size, fused = self.num_channels, FUSED["bcx_proj"]
        for name in fused:
            yield from context.input_projection(f"{path}.{name}", size, "attention", fused, bias=self.bias)
        yield from self.convolution(f"{path}.conv", size, context, bias=self.bias)
        yield from context.output_projection(f"{path}.out_proj", size, "attention", bias=self.bias)
