"""PooledAttention: attention of all heads to pools of neighbouring keys that are chosen by index keys.

A token keeps the keys of all KV heads of the rank, their values, its index key and its angles side by side. The last
token of a pool keeps the pool's index key in place of its angles. Shapes: T tokens, H hidden, E numbers of an index
key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import AttentionCache
from nvcli.kernels.compressed_keys import store_inputs
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.rotary import norm_rope
from nvcli.models.block_attention import SideBySideAttention
from nvcli.models.layers import Angles, Norm
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.mixers.pooled_index import INDEX_NORMS, INDEX_PROJECTION, PooledIndexConfig
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, values_of


class PooledAttention(SideBySideAttention):
    """[T, H] → [T, this rank's heads × D]."""

    def __init__(
        self, build: BuildContext, path: str, config: AttentionConfig, norm: NormConfig, cache: AttentionCache
    ) -> None:
        super().__init__(build, path, config, norm, cache)
        assert isinstance(config.index, PooledIndexConfig)
        self.index = config.index
        name = INDEX_PROJECTION.rpartition(".")[2]
        self.index_proj = ColumnParallelLinear(build, f"{path}.{INDEX_PROJECTION}", (name,))
        of_queries, of_keys = (Norm(build, f"{path}.{name}", norm, size=self.index.head_dim) for name in INDEX_NORMS)
        self.index_q_norm, self.index_k_norm = of_queries, of_keys

    def store_index(self, x: Activations, angles: Angles, kept: Tensor, batch: ForwardBatch) -> Tensor:
        size = self.index.head_dim
        projected = self.index_proj(values_of(x), batch.token_adapters)
        cos_sin = angles.of((self.index.rope, size))
        assert cos_sin is not None
        queries, keys = projected[:, :-size], projected[:, -size:]
        rows = torch.cat((keys, cos_sin.to(keys.dtype)), dim=1)
        store_inputs(rows, kept, batch.slot_mapping[self.spec.kv_group])
        return norm_rope(queries.view(len(queries), -1, size), cos_sin, self.index_q_norm.weight, self.eps)

    def fill_pools(self, batch: ForwardBatch) -> None:
        chosen_keys = batch.backend.chosen_keys
        assert chosen_keys is not None
        chosen_keys.average_pools(self.cache, self.index_k_norm.weight, self.eps, batch)

    def choose(self, queries: Tensor, batch: ForwardBatch) -> None:
        chosen_keys = batch.backend.chosen_keys
        assert chosen_keys is not None
        weights = torch.ones(queries.shape[:2], dtype=torch.float32, device=queries.device)
        chosen_keys.choose(self.cache, queries, weights, batch)
