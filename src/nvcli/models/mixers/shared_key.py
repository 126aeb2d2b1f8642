"""SharedKeyConfig: attention whose heads share one key for each token, which is its value, too, and CompressionConfig:
keys that stand for several tokens each, to which its tokens attend besides those of their window (DeepSeek-V4, 2026).
`models/shared_key.py` computes both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from nvcli.attention.kv_layout import KVDtype, token_bytes
from nvcli.attention.spec import AttentionSpec, CompressedKeys
from nvcli.core.config_types import KeptWeights
from nvcli.models.mixers.mixer import LayerContext, Mixer, MixerCosts, Piece, Ranks, Rotation
from nvcli.models.rope_config import RopeConfig
from nvcli.models.tensor_spec import Sharding, StoredDtype, TensorSpec, matrix, vector

COMPRESSOR, INDEXER = "compressor", "compressor.indexer"
"""The modules that make keys, and index keys and the choice by these."""
INPUT_PROJECTIONS = "kv_proj", "gate_proj"
"""Each module's projections: to the values that a key averages, and to the gates that weigh them."""
POSITION_BIAS, KEY_NORM, INDEX_QUERIES, INDEX_WEIGHTS = "position_bias", "kv_norm", "q_b_proj", "scorer.weights_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionConfig:
    """Keys of windows of tokens that follow each other: means of what each token is projected to, weighed number by
    number by gates. A layer attends to all of these keys, or to a choice of them that an indexer makes by index keys,
    which are made in the same way."""

    rate: int
    """The tokens of a window."""
    num_series: int
    """2: a key also averages the previous window, by a second series of values and gates; 1: it averages its own window
    alone."""
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
        """Return what a layer with the spec `spec` keeps in addition to the keys of tokens."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedKeyConfig(Mixer):
    """Attention to one key of each token, whose last numbers are rotated, by all heads. As keys are values, results are
    rotated back by the angle of their token, so that they depend on distances alone. Each head has a sink."""

    name: ClassVar[str] = "self_attn"
    module: ClassVar[str] = "nvcli.models.shared_key:SharedKeyAttention"
    num_heads: int
    head_dim: int
    query_rank: int
    """The size of the latent vector that queries are projected from."""
    num_groups: int
    """The number of groups of heads. The results of each group are first projected to `group_rank` numbers, and then
    all of these together."""
    group_rank: int
    window: int | None
    """The number of tokens that a token attends to, itself and those right before it; None: all earlier ones."""
    rope: RopeConfig
    """The rotation of the last `rope_dim` numbers of a head."""
    rope_dim: int
    norm_eps: float
    """The epsilon of the norms of latent vectors, heads and keys."""
    compression: CompressionConfig | None = None
    """Keys that stand for several tokens each, to which tokens attend as well; None: there are none."""

    @property
    def most_chosen(self) -> int | None:
        return None if self.compression is None else self.compression.top_k

    @property
    def batch_dependence(self) -> str | None:
        if self.compression is None:
            return None
        return "keys that stand for several tokens, to which steps attend in an order that depends on their rows"

    @property
    def input_projections(self) -> tuple[str, ...]:
        """The projections of the block's input, which one product computes."""
        return "q_a_proj", "kv_proj"

    @property
    def rotation(self) -> Rotation:
        return self.rope, self.rope_dim

    def kv_spec(self, tensor_parallel_size: int = 1, kv_group: int = 0) -> AttentionSpec:
        spec = AttentionSpec(
            num_heads=self.num_heads // tensor_parallel_size,
            num_kv_heads=1,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=self.window,
            has_sinks=True,
            kv_group=kv_group,
            value_dim=self.head_dim,
            has_values=False,
        )
        return spec if self.compression is None else replace(spec, compressed=self.compression.kept(spec))

    def costs(self, num_layers: int, dtype: StoredDtype, kv_dtype: KVDtype, tensor_parallel_size: int) -> MixerCosts:
        spec, chosen = self.kv_spec(tensor_parallel_size), self.most_chosen or 0
        return MixerCosts(
            window=None if self.window is None else self.window + chosen,
            kv_bytes_per_token=num_layers * spec.token_bytes(kv_dtype),
            flops_per_pair=num_layers * 2 * spec.num_heads * 2 * self.head_dim,
        )

    def choice_costs(self, num_layers: int, kv_dtype: KVDtype) -> MixerCosts | None:
        """Return the costs of the compressed keys that a token reads, which without a choice are attended."""
        if self.compression is None:
            return None
        heads, size = self.num_heads, 2 * self.head_dim
        if self.compression.top_k is not None:
            heads, size = self.compression.num_index_heads, self.compression.index_dim
        return MixerCosts(
            kv_bytes_per_token=num_layers
            * token_bytes(1, self.compression.sizes(self.head_dim)[-1], kv_dtype)
            // self.compression.rate,
            flops_per_pair=num_layers * 2 * heads * size // self.compression.rate,
        )

    def num_kernels(self, ranks: Ranks) -> int:
        return 9 + (0 if self.compression is None else 3 if self.compression.top_k is None else 9)

    def check(self, ranks: Ranks) -> Iterator[str]:
        if self.num_groups % ranks.size:
            yield f"{self.num_groups} groups of heads do not divide by {ranks.size}"

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        yield Piece("q_a_proj", self.query_rank, None, self.query_rank + self.head_dim)
        yield Piece("kv_proj", self.head_dim, None)
        yield Piece("q_b_proj", self.num_heads // ranks.size * self.head_dim, None)
        yield Piece("o_b_proj", self.num_groups // ranks.size * self.group_rank, "o_b_proj")

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        """Count the elements: queries, results, and the projected results of groups."""
        of_rank = 2 * self.num_heads * self.head_dim + self.num_groups * self.group_rank
        of_keys = 0
        if self.compression is not None:
            of_keys = self.compression.input_dim(self.head_dim)
            of_keys += self.compression.num_index_heads * self.compression.index_dim
        return of_keys + 3 * hidden_size + 2 * (self.query_rank + self.head_dim) + of_rank // ranks.size

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        """Yield the tensors. Each rank has all keys, and some of the groups of heads, whose first output projection is
        never quantised: as published, it is multiplied by activations that are not."""
        hidden, dtype, fused = context.hidden_size, context.dtype, self.input_projections
        size = self.num_heads * self.head_dim
        yield matrix(f"{path}.q_a_proj", (self.query_rank, hidden), Sharding.REPLICATED, dtype, "attention", fused)
        yield context.norm_weight(f"{path}.q_a_norm", self.query_rank, "attention")
        yield matrix(f"{path}.q_b_proj", (size, self.query_rank), Sharding.ROWS, dtype, "attention", ("q_b_proj",))
        yield matrix(f"{path}.kv_proj", (self.head_dim, hidden), Sharding.REPLICATED, dtype, "attention", fused)
        yield context.norm_weight(f"{path}.kv_norm", self.head_dim, "attention")
        between = self.num_groups * self.group_rank
        shape = between, size // self.num_groups
        yield replace(
            matrix(f"{path}.o_a_proj", shape, Sharding.ROWS, dtype, "attention"),
            in_linear_layer=False,
        )
        yield from context.output_projection(f"{path}.o_b_proj", between, "attention")
        yield vector(f"{path}.sinks", self.num_heads, Sharding.ROWS, "attention")  # in float32, as kernels take them
        if self.compression is not None:
            yield from self.compression.tensors(path, context, self.head_dim, self.query_rank)
