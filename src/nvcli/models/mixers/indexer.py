"""IndexerConfig: the choice of keys in DeepSeek Sparse Attention (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556).
`models/indexer.py` computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nvcli.models.mixers.mixer import LayerContext
from nvcli.models.tensor_spec import Sharding, TensorSpec, matrix, vector

INDEX_KEYS = "indexer_wk"
"""The projection to index keys, which is fused with the others of the block's input."""
STORED_INDEX_KEYS = ".indexer.wk.", f".{INDEX_KEYS}."
"""Its name in files and in the decoder."""
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
    num_first: int = 0
    """Numbers that stand before the rotated ones in files, and behind them here: scores do not depend on the order."""

    @property
    def row_order(self) -> tuple[int, ...] | None:
        """The order in which ranks keep the numbers of a query and a key; None: that of the files."""
        return (*range(self.num_first, self.head_dim), *range(self.num_first)) if self.num_first else None

    def unused_tensors(self, path: str) -> Iterator[str]:
        """Yield the names of its tensors in the block `path`."""
        yield from (f"{path}.{name}.weight" for name in _MATRIX_NAMES)
        yield from (f"{path}.indexer.k_norm.{kind}" for kind in ("weight", "bias"))

    def tensors(
        self, path: str, context: LayerContext, query_rank: int, fused: tuple[str, ...]
    ) -> Iterator[TensorSpec]:
        """Yield the tensors of the block `path`. `fused`: the projections of the block's input."""
        queries, keys, weights = (f"{path}.{name}" for name in _MATRIX_NAMES)
        replicated, dtype, order = Sharding.REPLICATED, context.dtype, self.row_order
        size = self.num_heads * self.head_dim
        of_queries = matrix(queries, (size, query_rank), replicated, dtype, "attention", ("wq_b",))
        yield replace(of_queries, row_order=order)
        of_keys = matrix(keys, (self.head_dim, context.hidden_size), replicated, dtype, "attention", fused)
        yield replace(of_keys, row_order=order)
        # In float32: choices should not change where scores are close.
        weight = matrix(weights, (self.num_heads, context.hidden_size), replicated, "float32", "attention")
        yield replace(weight, in_linear_layer=False)
        for kind in ("weight", "bias"):
            norm = vector(f"{path}.indexer.k_norm.{kind}", self.head_dim, replicated, "norms")
            yield replace(norm, row_order=order)
