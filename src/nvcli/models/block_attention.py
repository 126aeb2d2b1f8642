"""SideBySideAttention: attention to chosen keys of KV heads whose keys stand side by side, and BlockAttention: the same
to blocks of keys that each KV head chooses by index keys.

A token keeps the keys of all KV heads of the rank, their values and its index key side by side. Shapes: T tokens, H
hidden, K KV heads of this rank, D numbers of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from nvcli.attention.forward_batch import AttentionLayer, ForwardBatch
from nvcli.attention.spec import AttentionCache
from nvcli.kernels.chosen_keys import split_rows
from nvcli.kernels.compressed_keys import store_inputs
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.key_copies import copy_keys
from nvcli.kernels.rotary import norm_rope, qk_norm_rope_store
from nvcli.models.layers import Angles, Attention, Norm
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.block_index import INDEX_KEYS, INDEX_NORMS, INDEX_QUERIES
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, values_of


class SideBySideAttention(Attention, ABC):
    """Attention to chosen keys: [T, H] → [T, this rank's heads × D]. What chooses them is kept behind the values."""

    @property
    def reads_values(self) -> bool:
        return True

    @abstractmethod
    def store_index(self, x: Activations, angles: Angles, kept: Tensor, batch: ForwardBatch) -> Tensor:
        """Store what the tokens keep for the choice in `kept` [blocks, block_size, spec.index_dim], and return their
        index queries [T, index heads, numbers of an index key]."""

    def fill_pools(self, batch: ForwardBatch) -> None:
        """Store the index keys of the pools that the batch's tokens fill, if it has any."""

    @abstractmethod
    def choose(self, queries: Tensor, batch: ForwardBatch) -> None:
        """Choose the keys of the batch's tokens."""

    def forward(self, x: Activations, angles: Angles, batch: ForwardBatch) -> Tensor:
        """Store the tokens' keys, values and index keys, choose keys, and attend to them."""
        spec = self.spec
        slots, chosen_keys = batch.slot_mapping[spec.kv_group], batch.backend.chosen_keys
        assert chosen_keys is not None
        cache, values = batch.kv_cache.layer(self.cache.number)
        k_cache, v_cache = split_rows(cache[:, :, 0, : spec.key_dim], spec.row_heads)
        qkv, gates = self.split_gates(self.qkv_proj(x, batch.token_adapters))
        q, _, _ = qk_norm_rope_store(
            qkv,
            angles.of(self.rotation),
            k_cache,
            v_cache,
            slots,
            num_heads=spec.num_heads,
            num_kv_heads=spec.row_heads,
            q_weight=None if self.q_norm is None else self.q_norm.weight,
            k_weight=None if self.k_norm is None else self.k_norm.weight,
            eps=self.eps,
            keep_keys=False,
        )
        queries = self.store_index(x, angles, cache[:, :, 0, spec.index_place], batch)
        if batch.key_copies is not None:
            self.fill_pools(batch)  # so that they are copied with their keys
            copy_keys(cache, values, None, batch.key_copies.of_groups[spec.kv_group])
        self.fill_pools(batch)  # those that began with copied keys, too
        self.choose(queries, batch)
        attended = chosen_keys.attend(AttentionLayer(spec, self.cache.number), q, batch).flatten(1)
        return self._gated(attended, gates)


class BlockAttention(SideBySideAttention):
    """Attention of each KV head to blocks of keys that it chooses by index keys."""

    def __init__(
        self, build: BuildContext, path: str, config: AttentionConfig, norm: NormConfig, cache: AttentionCache
    ) -> None:
        super().__init__(build, path, config, norm, cache)
        self.index_proj = ColumnParallelLinear(build, f"{path}.index_proj", (INDEX_QUERIES, INDEX_KEYS))
        of_queries, of_keys = (Norm(build, f"{path}.{name}", norm, size=config.head_dim) for name in INDEX_NORMS)
        self.index_q_norm, self.index_k_norm = of_queries, of_keys

    def store_index(self, x: Activations, angles: Angles, kept: Tensor, batch: ForwardBatch) -> Tensor:
        cos_sin = angles.of(self.rotation)
        index = self.index_proj(values_of(x), batch.token_adapters)
        index = index.view(len(index), -1, self.spec.index_dim)
        keys = norm_rope(index[:, -1:], cos_sin, self.index_k_norm.weight, self.eps)
        store_inputs(keys[:, 0], kept, batch.slot_mapping[self.spec.kv_group])
        return norm_rope(index[:, :-1], cos_sin, self.index_q_norm.weight, self.eps)

    def choose(self, queries: Tensor, batch: ForwardBatch) -> None:
        chosen_keys = batch.backend.chosen_keys
        assert chosen_keys is not None
        chosen_keys.choose(self.cache, queries, None, batch)
