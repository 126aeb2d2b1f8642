"""LatentAttentionConfig: multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434), and
IndexerConfig: its choice of keys in DeepSeek Sparse Attention (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).
`models/latent_attention.py` computes both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from nvcli.attention.kv_layout import KVDtype, token_bytes
from nvcli.attention.spec import AttentionSpec, HeadSizes
from nvcli.core.config_types import KeptWeights
from nvcli.kernels.pool_settings import Pools
from nvcli.models.mixers.attention import GATE, HEAD_SCALES, OutputGate, QueryScaling, head_scale_tensors
from nvcli.models.mixers.mixer import (
    NO_CHOICE,
    ChoosingMixer,
    LayerContext,
    MixerCosts,
    Piece,
    Ranks,
    Rotation,
    choice_dependence,
)
from nvcli.models.rope_config import RopeConfig
from nvcli.models.tensor_spec import Sharding, StoredDtype, TensorSpec, matrix, vector, with_bias

INDEX_KEYS, INDEX_GATES = "indexer_wk", "indexer_gates"
"""The projections to index keys and their gates, which are fused with the others of the block's input."""
STORED_INDEX_NAMES = (
    (".indexer.wk.", f".{INDEX_KEYS}."),
    (".indexer.index_kpool_compress_gate", f".{INDEX_GATES}.weight"),
)
"""Their names in files and in the decoder."""
POOL_BIAS = "index_kpool_compress_ape"
"""Numbers that are added to the gates of a pool's keys, by their place in it."""
_MATRIX_NAMES = "indexer.wq_b", INDEX_KEYS, "indexer.weights_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """Scores of earlier tokens, by which a token's keys are chosen: a weighted sum over heads of max(0, query · key).

    A token has one index key. Each rank computes the scores of all heads.
    """

    num_heads: int
    head_dim: int
    """Numbers of a query and a key, of which the first ones are rotated."""
    is_interleaved: bool
    """Whether neighbouring numbers are rotated as pairs."""
    norm_eps: float = 1e-6
    pool: int = 1
    """Neighbouring keys that are chosen together, by a mean of their keys that gates weigh."""
    reads_input: bool = False
    """Whether queries are projected from the block's input, normed (LayerNorm), and not from the latent vector of the
    layer's queries."""
    scales_queries: bool = False
    """Whether queries are multiplied by factors of their heads (`head_scale_tensors`)."""
    num_first: int = 0
    """Numbers that files store before the rotated ones, and ranks keep after them: scores do not depend on the
    order."""

    @property
    def row_order(self) -> tuple[int, ...] | None:
        """The order in which ranks keep the numbers of a query and a key; None: that of the files."""
        return (*range(self.num_first, self.head_dim), *range(self.num_first)) if self.num_first else None

    @property
    def input_projections(self) -> tuple[str, ...]:
        """The projections of the block's input for index keys."""
        return (INDEX_KEYS,) if self.pool == 1 else (INDEX_KEYS, INDEX_GATES)

    @property
    def input_dim(self) -> int:
        """The numbers that these give a token."""
        return len(self.input_projections) * self.head_dim

    @property
    def kept_dim(self) -> int:
        """The numbers that a token keeps: its key, and with pools its gates and the key of the pool that it fills."""
        return self.head_dim if self.pool == 1 else 3 * self.head_dim

    @property
    def num_kernels(self) -> int:
        """The number of kernels that a decode step launches for it."""
        return (5 if self.pool == 1 else 7) + self.reads_input + 2 * self.scales_queries

    def unused_tensors(self, path: str) -> Iterator[str]:
        """Yield the names of its tensors in the block `path`."""
        yield from (f"{path}.{name}.weight" for name in _MATRIX_NAMES)
        if self.pool > 1:
            yield from (f"{path}.{INDEX_GATES}.weight", f"{path}.indexer.{POOL_BIAS}")
        norms = ("k_norm", "q_input_norm") if self.reads_input else ("k_norm",)
        yield from (f"{path}.indexer.{norm}.{kind}" for norm in norms for kind in ("weight", "bias"))
        if self.scales_queries:
            yield from (f"{path}.indexer.{HEAD_SCALES}.{kind}" for kind in ("scale", "bias"))

    def tensors(
        self, path: str, context: LayerContext, query_rank: int | None, fused: tuple[str, ...]
    ) -> Iterator[TensorSpec]:
        """Yield the tensors of the block `path`. `query_rank`: the size of the latent vector of the layer's queries, if
        it has one; `fused`: the projections of the block's input."""
        queries, keys, weights = (f"{path}.{name}" for name in _MATRIX_NAMES)
        replicated, dtype, order = Sharding.REPLICATED, context.dtype, self.row_order
        size = self.num_heads * self.head_dim
        width = context.hidden_size if self.reads_input or query_rank is None else query_rank
        of_queries = matrix(queries, (size, width), replicated, dtype, "attention", ("wq_b",))
        yield replace(of_queries, row_order=order)
        of_keys = matrix(keys, (self.head_dim, context.hidden_size), replicated, dtype, "attention", fused)
        yield replace(of_keys, row_order=order)
        if self.pool > 1:
            yield replace(of_keys, name=f"{path}.{INDEX_GATES}.weight", row_order=order)
            bias = vector(f"{path}.indexer.{POOL_BIAS}", self.head_dim, replicated, "norms")
            yield replace(bias, shape=(self.pool, self.head_dim), column_order=order, in_linear_layer=False)
        # In float32: choices should not change where scores are close.
        weight = matrix(weights, (self.num_heads, context.hidden_size), replicated, "float32", "attention")
        yield replace(weight, in_linear_layer=False)
        for kind in ("weight", "bias"):
            norm = vector(f"{path}.indexer.k_norm.{kind}", self.head_dim, replicated, "norms")
            yield replace(norm, row_order=order)
            if self.reads_input:
                yield vector(f"{path}.indexer.q_input_norm.{kind}", width, replicated, "norms")
        if self.scales_queries:
            yield from head_scale_tensors(f"{path}.indexer", self.num_heads, replicated)


ROTATED_NORM = "k_rope_only_layernorm"
"""The norm of rotated keys."""
LATENTS, FROM_LATENTS = "kv_a_proj_with_mqa", "kv_b_proj"
"""The projections to latents and rotated keys, and from latents to keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionConfig(ChoosingMixer):
    """Attention to a latent vector of each token, from which the keys and values of all heads are projected, and to one
    rotated key that all heads share.

    A query is projected to the latents' space instead (it is absorbed), and so is the result from there: a token's
    latent and rotated key are then one key for all heads, whose first numbers are its value.
    """

    name: ClassVar[str] = "self_attn"
    module: ClassVar[str] = "nvcli.models.latent_attention:LatentAttention"
    divided: ClassVar[tuple[str, str]] = ("num_heads", "attention heads")
    num_heads: int
    query_rank: int | None
    """The size of the latent vector that queries are projected from; None: they are projected from the block's
    input."""
    latent_dim: int
    """The size of the latent vector that keys and values are projected from."""
    plain_dim: int
    """Numbers of each head's query and key that are not rotated; the rotated ones follow them."""
    rope_dim: int
    value_dim: int
    scale: float
    """Scores are multiplied by it before the softmax; positive."""
    rope: RopeConfig | None
    """The rotation of `rope_dim` numbers; None: they stay as they are."""
    norm_eps: float
    """The epsilon of the norms of latent vectors."""
    bias: bool = False
    """Whether the projections to latents and of the result have biases."""
    query_scaling: QueryScaling | None = None
    scales_heads: bool = False
    """Whether queries are multiplied by factors of their heads (`head_scale_tensors`)."""
    query_factor: float = 1.0
    latent_factor: float = 1.0
    """Factors of the normed latent vectors, of queries and of keys and values."""
    gate: OutputGate | None = None
    """The gates of each head's result, if it has them. Where the query projection has their rows, it reads the latent
    vector both normed and as it is."""
    has_sinks: bool = False
    """Whether each head has a learned score that belongs to no key in every softmax."""
    window: int | None = None
    """The number of tokens that a token attends to, itself and those right before it; None: all earlier ones."""
    norms_rotated: bool = False
    """Whether a token's rotated key is normed before its rotation."""
    indexer: IndexerConfig | None = None
    """The layer's own indexer; None: with `top_k`, the layer reuses the choice of the last layer that has one."""
    reads_kv_of: int | None = None
    """The number of an earlier layer whose latent vectors and rotated keys it reads; None: it has its own."""
    index_dims: tuple[int, ...] | None = None
    """The numbers that choices keep behind a token's latent vector: those of each layer that reads it, the layer that
    has it first, 0 for one that makes no choice. None: the layer is the only one."""
    index_number: int = 0
    """The layer's own place in this list."""

    @property
    def chooser(self) -> IndexerConfig | None:
        """The layer's own choice of keys, if the run makes one."""
        return None if self.top_k is None else self.indexer

    @property
    def reads_earlier_choice(self) -> bool:
        return self.top_k is not None and self.indexer is None

    @property
    def note(self) -> str | None:
        return None if self.indexer is None or self.top_k is not None else NO_CHOICE

    @property
    def batch_dependence(self) -> str | None:
        return None if self.top_k is None else choice_dependence(self.top_k)

    @property
    def query_dim(self) -> int:
        """The size of each head's query before it is absorbed."""
        return self.plain_dim + self.rope_dim

    @property
    def gates_in_queries(self) -> bool:
        """Whether the query projection has the rows of gates."""
        return self.gate is not None and self.gate.is_in_queries

    @property
    def has_wide_gate(self) -> bool:
        """Whether the results have a gate for each number, from a projection of the block's input."""
        return self.gate is not None and not (self.gate.is_in_queries or self.gate.is_of_heads)

    @property
    def projected_dim(self) -> int:
        """The numbers that the query projection makes for each head: its query, and its gates if they are there."""
        return self.query_dim + self.gates_in_queries * self.value_dim

    @property
    def key_dim(self) -> int:
        """The numbers that a token keeps: its latent vector and its rotated key."""
        return self.latent_dim + self.rope_dim

    @property
    def first_projection(self) -> str:
        """The projection of the block's input for queries."""
        return "q_proj" if self.query_rank is None else "q_a_proj"

    @property
    def input_projections(self) -> tuple[str, ...]:
        """The projections of the block's input, which one product computes."""
        gates = (GATE,) if self.has_wide_gate else ()
        own = () if self.chooser is None else self.chooser.input_projections
        return *gates, self.first_projection, *own, *(() if self.shares_kv else (LATENTS,))

    @property
    def shares_kv(self) -> bool:
        """Whether it reads what an earlier layer keeps of tokens."""
        return self.reads_kv_of is not None

    @property
    def stored_dim(self) -> int:
        """The numbers of a token's key that its own projections make."""
        return 0 if self.shares_kv else self.key_dim

    @property
    def rotation(self) -> Rotation | None:
        return None if self.rope is None else (self.rope, self.rope_dim)

    def kv_spec(self, tensor_parallel_size: int = 1, kv_group: int = 0) -> AttentionSpec:
        sizes = HeadSizes(key_dim=self.query_dim, value_dim=self.value_dim, rope_dim=self.rope_dim)
        index_dim, part = 0 if self.chooser is None else self.chooser.kept_dim, None
        if self.index_dims is not None and self.top_k is not None:
            first = sum(self.index_dims[: self.index_number])
            part, index_dim = (first, first + index_dim), sum(self.index_dims)
        return AttentionSpec(
            num_heads=self.num_heads // tensor_parallel_size,
            num_kv_heads=1,
            head_dim=self.key_dim + index_dim,
            scale=self.scale,
            kv_group=kv_group,
            value_dim=self.latent_dim,
            has_values=False,
            has_sinks=self.has_sinks,
            window=self.window,
            projected=sizes if self.window is None else None,
            top_k=self.top_k,
            index_dim=index_dim,
            index_part=part,
            index_pools=Pools(size=1 if self.chooser is None else self.chooser.pool),
        )

    def costs(self, num_layers: int, dtype: StoredDtype, kv_dtype: KVDtype, tensor_parallel_size: int) -> MixerCosts:
        """Return the costs of absorbed queries. Those of prompts could be attended as they are projected, to keys and
        values of each head."""
        num_heads, fewest = self.num_heads // tensor_parallel_size, None
        if self.top_k is None and self.window is None:
            fewest = num_layers * 2 * num_heads * (self.query_dim + self.value_dim)
        return MixerCosts(
            window=self.window if self.top_k is None else self.top_k,
            kv_bytes_per_token=num_layers * token_bytes(1, self.key_dim, kv_dtype),
            flops_per_pair=num_layers * 2 * num_heads * (self.key_dim + self.latent_dim),
            fewest_prompt_flops_per_pair=fewest,
        )

    def choice_costs(self, num_layers: int, kv_dtype: KVDtype) -> MixerCosts | None:
        if self.chooser is None:
            return None
        size = self.chooser.head_dim
        return MixerCosts(
            kv_bytes_per_token=num_layers * token_bytes(1, size, kv_dtype) // self.chooser.pool,
            flops_per_pair=num_layers * 2 * self.chooser.num_heads * size // self.chooser.pool,
        )

    def num_kernels(self, ranks: Ranks) -> int:
        gates = 0 if self.gate is None else 1 + self.gate.is_of_heads + 2 * self.gate.is_in_queries
        of_choice = 0 if self.chooser is None else self.chooser.num_kernels
        others = 3 * self.scales_heads + 2 * self.norms_rotated
        return (7 if self.query_rank is None else 9) + gates + of_choice + others

    def pieces(self, ranks: Ranks) -> Iterator[Piece]:
        heads = self.num_heads // ranks.size
        queries, gates = heads * self.projected_dim, heads * self.value_dim * self.has_wide_gate
        others = gates + self.stored_dim + (0 if self.chooser is None else self.chooser.input_dim)
        if self.query_rank is None:
            yield Piece("q_proj", queries, None, queries + others)
        else:
            yield Piece("q_a_proj", self.query_rank, None, self.query_rank + others)
            yield Piece("q_b_proj", queries, None)
        if self.chooser is not None:
            yield Piece("indexer.wk", self.chooser.head_dim, None)
            yield Piece("indexer.wq_b", self.chooser.num_heads * self.chooser.head_dim, None)
        yield Piece("o_proj", heads * self.value_dim, "o_proj")

    def activation_elements(self, hidden_size: int, ranks: Ranks, quantization: KeptWeights) -> int:
        """Count the elements: queries as they are projected and as they are absorbed, and results in both forms."""
        of_head = self.query_dim + self.key_dim + self.latent_dim + (1 + self.has_wide_gate) * self.value_dim
        if self.gates_in_queries:  # and both apart
            of_head += self.query_dim + 2 * self.value_dim
        of_choice = 0
        if self.chooser is not None:
            of_choice = self.chooser.num_heads * self.chooser.head_dim + self.chooser.input_dim
            of_choice += (1 + self.chooser.reads_input) * hidden_size
        of_token = 3 * hidden_size + 2 * (self.query_rank or 0) + 2 * self.key_dim + of_choice
        return of_token + self.num_heads // ranks.size * of_head

    def unused_tensors(self, path: str) -> Iterator[str]:
        return iter(()) if self.indexer is None or self.top_k is not None else self.indexer.unused_tensors(path)

    def tensors(self, path: str, context: LayerContext) -> Iterator[TensorSpec]:
        """Yield the tensors. Each rank has all latents, and some of the heads. The projection from latents is never
        quantised: queries and results are multiplied by its parts."""
        hidden, dtype, heads = context.hidden_size, context.dtype, self.num_heads
        queries, fused = heads * self.projected_dim, self.input_projections
        if self.gate is not None and not self.gates_in_queries:
            size, kept_with = (heads, ()) if self.gate.is_of_heads else (heads * self.value_dim, fused)
            yield from context.input_projection(f"{path}.{GATE}", size, "attention", kept_with)
        if self.query_rank is None:
            yield matrix(f"{path}.q_proj", (queries, hidden), Sharding.ROWS, dtype, "attention", fused)
        else:
            shape = self.query_rank, hidden
            q_a_proj = matrix(f"{path}.q_a_proj", shape, Sharding.REPLICATED, dtype, "attention", fused)
            yield from with_bias(q_a_proj, bias=self.bias)
            factor = self.query_factor
            yield context.norm_weight(f"{path}.q_a_layernorm", self.query_rank, "attention", factor=factor)
            shape = queries, (1 + self.gates_in_queries) * self.query_rank
            yield matrix(f"{path}.q_b_proj", shape, Sharding.ROWS, dtype, "attention", ("q_b_proj",))
        if self.scales_heads:
            yield from head_scale_tensors(path, heads, Sharding.ROWS)
        if self.chooser is not None:
            yield from self.chooser.tensors(path, context, self.query_rank, fused)
        if not self.shares_kv:
            shape = self.key_dim, hidden
            latents = matrix(f"{path}.{LATENTS}", shape, Sharding.REPLICATED, dtype, "attention", fused)
            yield from with_bias(latents, bias=self.bias)
            factor = self.latent_factor
            yield context.norm_weight(f"{path}.kv_a_layernorm", self.latent_dim, "attention", factor=factor)
            if self.norms_rotated:
                yield context.norm_weight(f"{path}.{ROTATED_NORM}", self.rope_dim, "attention")
        shape = heads * (self.plain_dim + self.value_dim), self.latent_dim
        weight = matrix(f"{path}.{FROM_LATENTS}", shape, Sharding.ROWS, dtype, "attention")
        yield replace(weight, in_linear_layer=False)
        shape = hidden, heads * self.value_dim
        o_proj = matrix(f"{path}.o_proj", shape, Sharding.COLUMNS, dtype, "attention", ("o_proj",))
        yield from with_bias(o_proj, bias=self.bias)
        if self.has_sinks:  # in float32, as kernels take them
            yield vector(f"{path}.sinks", heads, Sharding.ROWS, "attention")
