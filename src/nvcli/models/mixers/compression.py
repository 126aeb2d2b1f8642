"""CompressionConfig: keys that stand for several tokens each, to which a layer's tokens attend besides those of their
window (DeepSeek-V4, 2026). `models/compressor.py` computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nvcli.attention.spec import AttentionSpec, CompressedKeys
from nvcli.models.mixers.mixer import LayerContext
from nvcli.models.tensor_spec import Sharding, TensorSpec, matrix, vector

COMPRESSOR, INDEXER = "compressor", "compressor.indexer"
"""The modules that make keys, and index keys and the choice by these."""
INPUT_PROJECTIONS = "kv_proj", "gate_proj"
"""The projections of each of these: to the numbers that a key is a mean of, and to their gates."""
POSITION_BIAS, KEY_NORM, INDEX_QUERIES, INDEX_WEIGHTS = "position_bias", "kv_norm", "q_b_proj", "scorer.weights_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionConfig:
    """Keys of windows of tokens that follow each other: means of what each token is projected to, weighed number by
    number by gates. A layer attends to all of these keys, or to those that an indexer chooses by keys made alike."""

    rate: int
    """The tokens of a window."""
    num_series: int
    """2: a key is also made of the window before, of which other numbers count than for that window's own key; 1: it is
    not."""
    top_k: int | None = None
    """The most keys that are chosen; None: all are attended."""
    num_index_heads: int = 0
    index_dim: int = 0
    """The numbers of an index key; 0 without a choice."""

    def sizes(self, head_dim: int) -> tuple[int, ...]:
        """The sizes of the keys that a window has: of `head_dim`, and with a choice its index key's."""
        return (head_dim, self.index_dim) if self.index_dim else (head_dim,)

    def input_dim(self, head_dim: int) -> int:
        """The numbers that a token keeps: values and gates."""
        return 2 * self.num_series * sum(self.sizes(head_dim))

    def kept(self, spec: AttentionSpec) -> CompressedKeys:
        """Return what a layer with the spec `spec` keeps besides the keys of tokens."""
        size = self.input_dim(spec.head_dim)
        window = self.num_series * self.rate
        keys = replace(
            spec,
            window=None,
            head_dim=spec.head_dim + self.index_dim,
            rate=self.rate,
            top_k=self.top_k,
            index_dim=self.index_dim,
        )
        return CompressedKeys(replace(spec, window=window, head_dim=size, value_dim=size), keys)

    def tensors(self, path: str, context: LayerContext, head_dim: int, query_rank: int) -> Iterator[TensorSpec]:
        """Yield the tensors of the block `path`, of which all ranks have all. None is ever quantised: as published,
        they are multiplied by activations that are not."""
        replicated, hidden = Sharding.REPLICATED, context.hidden_size
        for module, size in zip((COMPRESSOR, INDEXER), self.sizes(head_dim), strict=False):
            width = self.num_series * size
            for name in INPUT_PROJECTIONS:
                yield matrix(f"{path}.{module}.{name}", (width, hidden), replicated, context.dtype, "attention")
            bias = vector(f"{path}.{module}.{POSITION_BIAS}", width, replicated, "norms")
            yield replace(bias, shape=(self.rate, width), in_linear_layer=False)
            yield context.norm_weight(f"{path}.{module}.{KEY_NORM}", size, "attention")
        if self.index_dim:
            shape = self.num_index_heads * self.index_dim, query_rank
            yield matrix(f"{path}.{INDEXER}.{INDEX_QUERIES}", shape, replicated, context.dtype, "attention")
            # In float32: choices should not change where scores are close.
            shape = self.num_index_heads, hidden
            weights = matrix(f"{path}.{INDEXER}.{INDEX_WEIGHTS}", shape, replicated, "float32", "attention")
            yield replace(weights, in_linear_layer=False)
