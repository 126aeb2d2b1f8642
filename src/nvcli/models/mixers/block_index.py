"""BlockIndexConfig: the choice of blocks of keys in MiniMax Sparse Attention (MiniMax-M3,
https://huggingface.co/MiniMaxAI/MiniMax-M3). `models/block_attention.py` computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from nvcli.kernels.pool_settings import Pools
from nvcli.models.mixers.mixer import LayerContext
from nvcli.models.tensor_spec import Sharding, TensorSpec, matrix

INDEX_QUERIES, INDEX_KEYS = "index_q_proj", "index_k_proj"
INDEX_NORMS = "index_q_norm", "index_k_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexConfig:
    """Scores of earlier blocks, by which each KV head's keys are chosen: the highest product of its index query with
    the index keys of a block, of which a token has one. Both are normed and rotated as the layer's heads are."""

    num_heads: int
    head_dim: int
    pools: Pools

    def unused_tensors(self, path: str) -> Iterator[str]:
        """Yield the names of its tensors in the block `path`."""
        return (f"{path}.{name}.weight" for name in (INDEX_QUERIES, INDEX_KEYS, *INDEX_NORMS))

    def tensors(self, path: str, context: LayerContext, order: tuple[int, ...] | None) -> Iterator[TensorSpec]:
        """Yield the tensors of the block `path`. `order`: that of a head's rows."""
        fused = INDEX_QUERIES, INDEX_KEYS
        size = self.num_heads * self.head_dim
        for weight in context.input_projection(f"{path}.{INDEX_QUERIES}", size, "attention", fused):
            yield replace(weight, max_shards=self.num_heads, row_order=order)
        shape = self.head_dim, context.hidden_size
        keys = matrix(f"{path}.{INDEX_KEYS}", shape, Sharding.REPLICATED, context.dtype, "attention", fused)
        yield replace(keys, row_order=order)
        for name in INDEX_NORMS:
            yield replace(context.norm_weight(f"{path}.{name}", self.head_dim, "attention"), row_order=order)
