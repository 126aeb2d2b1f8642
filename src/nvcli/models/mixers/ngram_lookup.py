"""NGramLookupConfig: vectors of the n-grams of ids that end in a token, by their hashes (Qwen4, 2026; after Engram,
https://arxiv.org/abs/2601.07372). `models/ngram_lookup.py` computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, count, islice
from math import isqrt
from typing import ClassVar

from nvcli.attention.spec import StateSpec
from nvcli.core.config_types import KeptWeights
from nvcli.kernels.whole_numbers import ceil_div, round_up
from nvcli.models.mixers.mixer import LayerContext, Piece, Ranks, RecurrentMixer
from nvcli.models.tensor_spec import Sharding, TensorSpec, matrix

TABLE = "ple_embedding.ngram_embedding"
"""The name of the table, of whose parts files have the numbers."""
STREAM_NORMS = "norm_key", "norm_query", "norm_conv"
KEYS_AND_VALUES = "key_proj", "value_proj"
ID_CHANNELS = 16
"""The channels of the state behind those of the convolution, of which the first ones keep an id: rows stay aligned."""
MOST_IDS = 256**3 - 1
"""The ids that these can tell apart."""
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_LAYER_STEP = 10_007


@dataclass(frozen=True, slots=True, kw_only=True)
class NGramLookupConfig(RecurrentMixer):
    """A look-up before a layer's other blocks: its value, weighed by a gate of each residual stream, and a dilated
    convolution of what is weighed are added to the streams. Every rank computes all of it but the table, whose rows
    ranks share."""

    name: ClassVar[str] = "ple"
    module: ClassVar[str] = "nvcli.models.ngram_lookup:NGramLookup"
    num_streams: int
    hidden_size: int
    order: int
    """The longest n-grams, from 2 on, and the distance of the convolution's taps."""
    num_heads: int
    """The hashes of the n-grams of each order, each of which has rows of its own in the table."""
    vector_size: int
    """The numbers that all of them give a token."""
    conv_taps: int
    vocab_size: int
    separator: int
    """The id that parts texts: it stands for the tokens before it."""
    least_rows: int
    """The numbers of rows of the hashes are the first primes from here on, each used once in the model."""
    place: int
    """The number of such layers before this one, and the seed of its hashes besides `seed`."""
    seed: int
    rows_multiple: int
    """The rows of the table are padded to a multiple of it."""
    num_parts: int
    """The parts in which files hold the table."""

    @property
    def num_hashes(self) -> int:
        """The hashes of a token."""
        return (self.order - 1) * self.num_heads

    @property
    def head_dim(self) -> int:
        """The numbers of a row."""
        return self.vector_size // self.num_hashes

    @property
    def width(self) -> int:
        """The numbers of all streams."""
        return self.num_streams * self.hidden_size

    @property
    def head_rows(self) -> tuple[int, ...]:
        """The number of rows of each hash: primes."""
        return _primes(self.least_rows, (self.place + 1) * self.num_hashes)[-self.num_hashes :]

    @property
    def first_rows(self) -> tuple[int, ...]:
        """Each hash's first row in the table."""
        return tuple(accumulate(self.head_rows[:-1], initial=0))

    @property
    def num_rows(self) -> int:
        """The rows of the table."""
        return round_up(sum(self.head_rows), self.rows_multiple)

    @property
    def factors(self) -> tuple[int, ...]:
        """The odd numbers by which ids are multiplied in the hashes, the token's own first. Products have 63 bits."""
        half = max(1, ((1 << 63) - 1) // self.vocab_size // 2)
        start = self.seed + _LAYER_STEP * self.place
        return tuple(2 * (_split_mix(start + _GAMMA * number) % half) + 1 for number in range(1, self.order + 1))

    def kv_spec(self, tensor_parallel_size: int = 1, kv_group: int = 0) -> StateSpec:
        kept = (self.conv_taps - 1) * self.order, self.width + ID_CHANNELS
        return StateSpec(conv_shape=kept, recurrent_shape=(0, 0, 0), kv_group=kv_group)

    def state_flops(self, spec: StateSpec) -> int:
        return 2 * self.conv_taps * self.width

    def num_kernels(self, ranks: Ranks) -> int:
        return 8

    def check(self, ranks: Ranks) -> Iterator[str]:
        return iter(())

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        return iter(())

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        return 6 * self.width + 2 * self.vector_size

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        """Yield the tensors, with each part of the table that files hold."""
        replicated, dtype = Sharding.REPLICATED, context.dtype
        part_rows = ceil_div(self.num_rows, self.num_parts)
        for part, first in enumerate(range(0, self.num_rows, part_rows)):
            shape = min(part_rows, self.num_rows - first), self.head_dim
            yield matrix(f"{path}.{TABLE}.shard_{part}", shape, Sharding.VOCAB, dtype, "embeddings")
        for name, size in zip(KEYS_AND_VALUES, (self.width, self.hidden_size), strict=True):
            weight = matrix(f"{path}.{name}", (size, self.vector_size), replicated, dtype, "attention")
            yield replace(weight, in_linear_layer=False)
        for name in STREAM_NORMS:
            yield context.norm_weight(f"{path}.{name}", self.width)
        yield matrix(f"{path}.conv1d", (self.width, 1, self.conv_taps), replicated, dtype, "attention")

    def unused_tensors(self, path: str) -> Iterator[str]:
        """Yield the names of numbers that follow from the configuration."""
        names = "layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"
        return (f"{path}.ple_embedding.{name}" for name in names)


def _split_mix(value: int) -> int:
    """Return the number that SplitMix64 makes of a state (https://doi.org/10.1145/2714064.2660195)."""
    value = (value + _GAMMA) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


@lru_cache(maxsize=16)  # as many as models have such layers
def _primes(least: int, number: int) -> tuple[int, ...]:
    """Return the first primes from `least` on."""
    return tuple(islice(filter(_is_prime, count(least)), number))


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, isqrt(number) + 1))
