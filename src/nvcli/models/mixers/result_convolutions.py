"""ResultConvolutions: short convolutions over the tokens of a layer's keys, values and results (Inkling,
https://huggingface.co/thinkingmachines/Inkling). `models/convolved_layer.py` computes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from nvcli.attention.spec import StateSpec
from nvcli.core.config_types import KeptWeights
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.mixer import LayerContext, Piece, Ranks, RecurrentMixer
from nvcli.models.tensor_spec import Sharding, TensorSpec, matrix, vector

CONVOLVED = ("k_conv", "v_conv", "mixer_conv", "mlp_conv")
"""The convolutions in the order in which their last inputs stand in a layer's state."""
MLP_FACTOR = "mlp_factor"
"""The number by which the result of the layer's MLP is multiplied."""


class ConvolvedPlaces(NamedTuple):
    """The channels of a rank's state."""

    keys_and_values: slice
    mixer: slice
    mlp: slice


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultConvolutions(RecurrentMixer):
    """Convolutions of a layer's keys and values before they are normed and stored, and of the results of both blocks
    before they are added to the residual stream. Each adds to its sum the token's own input.

    Results are sums over the ranks, and so are their convolutions: each rank convolves its own part.
    """

    name: ClassVar[str] = "convolutions"
    module: ClassVar[str] = "nvcli.models.convolved_layer:Convolutions"
    attention: AttentionConfig
    """The layer's attention."""
    hidden_size: int
    conv_taps: int
    """The number of tokens that a convolution reads: the token itself, and those right before it."""

    def places(self, tensor_parallel_size: int) -> ConvolvedPlaces:
        """Return the channels of each convolution in the state of one of so many ranks."""
        heads = self.attention.kv_heads_per_rank(tensor_parallel_size)
        first = heads * (self.attention.head_dim + self.attention.result_dim)
        second = first + self.hidden_size
        return ConvolvedPlaces(slice(first), slice(first, second), slice(second, second + self.hidden_size))

    def kv_spec(self, tensor_parallel_size: int = 1, kv_group: int = 0) -> StateSpec:
        channels = self.places(tensor_parallel_size).mlp.stop
        return StateSpec(conv_shape=(self.conv_taps - 1, channels), recurrent_shape=(0, 0, 0), kv_group=kv_group)

    def state_flops(self, spec: StateSpec) -> int:
        return 2 * self.conv_taps * spec.conv_shape[1]

    def num_kernels(self, ranks: Ranks) -> int:
        return 4

    def check(self, ranks: Ranks) -> Iterator[str]:
        return iter(())  # keys and values are cut as those of attention

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        return iter(())

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        """Count the elements: a block's result and what becomes of it, beside the stream."""
        return 3 * hidden_size

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        """Yield the tensors, in float32, in which sums are computed."""
        attention, hidden = self.attention, self.hidden_size
        num_heads = attention.num_kv_heads
        sizes = num_heads * attention.head_dim, num_heads * attention.result_dim, hidden, hidden
        for name, size in zip(CONVOLVED, sizes, strict=True):
            of_heads = name in CONVOLVED[:2]
            sharding = Sharding.ROWS if of_heads else Sharding.REPLICATED
            weight = matrix(f"{path}.{name}", (size, 1, self.conv_taps), sharding, "float32", "attention")
            yield replace(weight, max_shards=num_heads if of_heads else None)
        yield vector(f"{path}.{MLP_FACTOR}", 1, Sharding.REPLICATED, "MLP")
