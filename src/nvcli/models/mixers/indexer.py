"""IndexerConfig: the choice of keys in DeepSeek Sparse Attention (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).
`models/indexer.py` computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nvcli.models.mixers.attention import HEAD_SCALES, head_scale_tensors
from nvcli.models.mixers.mixer import LayerContext
from nvcli.models.tensor_spec import Sharding, TensorSpec, matrix, vector

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
    """Numbers that stand before the rotated ones in files, and behind them here: scores do not depend on the order."""

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
