"""BlockIndexConfig: the choice of blocks of keys in MiniMax Sparse Attention (MiniMax-M3,
https://huggingface.co/MiniMaxAI/MiniMax-M3). `models/block_attention.py` computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from nvcli.kernels.pool_settings import Pools
from nvcli.models.mixers.mixer import LayerContext, Piece, Rotation
from nvcli.models.tensor_spec import Sharding, TensorSpec, matrix

INDEX_QUERIES, INDEX_KEYS = "index_q_proj", "index_k_proj"
INDEX_NORMS = "index_q_norm", "index_k_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexConfig:
    """Scores of earlier blocks, by which each KV head's keys are chosen: the highest product of its index query with
    the index keys of a block, of which a token has one. Both are normed and rotated as the layer's heads are."""

    module: ClassVar[str] = "nvcli.models.block_attention:BlockAttention"
    shares_choice: ClassVar[bool] = False
    rotations: ClassVar[tuple[Rotation, ...]] = ()
    """The rotations beside that of the layer's heads."""
    num_heads: int
    head_dim: int
    pools: Pools

    @property
    def kept_dim(self) -> int:
        """The numbers that a token keeps: its key."""
        return self.head_dim

    @property
    def read_dim(self) -> int:
        """The numbers of what is read for each of a token's keys."""
        return self.head_dim

    def num_kernels(self, kv_heads: int) -> int:
        """Return the kernels of a decode step that choose keys, and attend to them by head."""
        return 7 + 5 * kv_heads

    def pieces(self, kv_heads: int) -> Iterator[Piece]:
        """Yield each rank's pieces of the projections."""
        yield Piece(INDEX_QUERIES, kv_heads * self.head_dim, None, (kv_heads + 1) * self.head_dim)

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
