"""PooledIndexConfig: the choice of pools of neighbouring keys in Qwen Sparse Attention (Qwen4, 2026).
`models/pooled_attention.py` computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from nvcli.kernels.pool_settings import Pools
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.mixers.mixer import LayerContext, Piece, Rotation
from nvcli.models.rope_config import RopeConfig
from nvcli.models.tensor_spec import Sharding, TensorSpec, matrix

INDEX_PROJECTION = "indexer.index_qk_proj"
"""The name of the projection to index queries, and to the index key behind them."""
INDEX_NORMS = "indexer.q_layernorm", "indexer.k_layernorm"


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledIndexConfig:
    """Scores of pools of earlier tokens, by which all heads' keys are chosen: a sum over index heads of max(0, query ·
    key). The key of a pool is the mean of its tokens' index keys, normed, and rotated as its first token is.

    Each rank computes the scores of all heads.
    """

    module: ClassVar[str] = "nvcli.models.pooled_attention:PooledAttention"
    shares_choice: ClassVar[bool] = True
    num_heads: int
    head_dim: int
    pools: Pools
    rope: RopeConfig
    """The rotation of index queries and keys."""

    @property
    def kept_dim(self) -> int:
        """The numbers that a token keeps: its key, and its angles or the key of the pool that it fills."""
        return 2 * self.head_dim

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """The rotations beside that of the layer's heads."""
        return ((self.rope, self.head_dim),)

    @property
    def read_dim(self) -> int:
        """The numbers of what is read for each of a token's keys: a share of a pool's."""
        return ceil_div(self.head_dim, self.pools.size)

    def num_kernels(self, kv_heads: int) -> int:
        """Return the kernels of a decode step: projection, norms and rotation, what is stored, the pools, the choice,
        and attention of each KV head."""
        return 8 + 2 * kv_heads

    def pieces(self, kv_heads: int) -> Iterator[Piece]:
        """Yield no pieces of projections: ranks have all of this one, and none quantises it."""
        return iter(())

    def unused_tensors(self, path: str) -> Iterator[str]:
        """Yield the names of its tensors in the block `path`."""
        return (f"{path}.{name}.weight" for name in (INDEX_PROJECTION, *INDEX_NORMS))

    def tensors(self, path: str, context: LayerContext, order: tuple[int, ...] | None) -> Iterator[TensorSpec]:
        """Yield the tensors of the block `path`, of which ranks have all."""
        own = self.rope.row_order(self.head_dim)
        shape = (self.num_heads + 1) * self.head_dim, context.hidden_size
        weight = matrix(f"{path}.{INDEX_PROJECTION}", shape, Sharding.REPLICATED, context.dtype, "attention")
        yield replace(weight, row_order=own)
        for name in INDEX_NORMS:
            yield replace(context.norm_weight(f"{path}.{name}", self.head_dim, "attention"), row_order=own)
