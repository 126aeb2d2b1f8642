"""LatentAttention: multi-head latent attention with absorbed queries, sharded over the ranks by heads. All ranks choose
the same keys, by an indexer that each of them has whole.

Each rank keeps the latents of all tokens. Shapes: T tokens, H hidden, N heads of this rank, L size of a latent vector,
R rotated numbers, D = L + R numbers of a key in the cache, Q size of the queries' latent vector, I index heads of E
numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvcli.attention.forward_batch import AttentionLayer, ForwardBatch
from nvcli.attention.spec import AttentionCache, AttentionSpec
from nvcli.kernels.chosen_keys import store_index_keys
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.gates import gate_values
from nvcli.kernels.invariant_linear import invariant_by_head
from nvcli.kernels.key_copies import copy_keys
from nvcli.kernels.latent_types import LatentHeads
from nvcli.kernels.latents import rotate_and_store, rotate_queries, stored_keys
from nvcli.kernels.linear import by_head
from nvcli.kernels.norm import rms_norm
from nvcli.kernels.routing import router_logits
from nvcli.models.layers import Angles, Norm, TokenMixer
from nvcli.models.mixers.attention import GATE
from nvcli.models.mixers.latent_attention import (
    FROM_LATENTS,
    POOL_BIAS,
    ROTATED_NORM,
    IndexerConfig,
    LatentAttentionConfig,
)
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import (
    BuildContext,
    ColumnParallelLinear,
    RowParallelLinear,
    TensorShard,
    TensorShards,
    values_of,
)
from nvcli.models.qkv import HeadScales, query_scale_table

Choice = tuple[Tensor, Tensor]
"""Queries [T, I, E], rotated, and the weights of heads [T, I] float32."""


class _LayerNorm(TensorShards):
    """The weight and the bias of a LayerNorm, of index keys or of the input of their queries."""

    bias: nn.Parameter

    def __init__(self, build: BuildContext, path: str) -> None:
        super().__init__(build, {kind: f"{path}.{kind}" for kind in ("weight", "bias")})


class Indexer(nn.Module):
    """Chooses the keys of a layer's tokens, once it has stored the tokens' own index keys."""

    def __init__(self, build: BuildContext, path: str, config: IndexerConfig, cache: AttentionCache) -> None:
        super().__init__()
        self.config, self.cache = config, cache
        self.wq_b = ColumnParallelLinear(build, f"{path}.wq_b", ("wq_b",))
        self.k_norm = _LayerNorm(build, f"{path}.k_norm")
        self.q_norm = _LayerNorm(build, f"{path}.q_input_norm") if config.reads_input else None
        self.query_scales = HeadScales(build, path) if config.scales_queries else None
        self.weights_proj = TensorShard(build, f"{path}.weights_proj.weight")
        self.pool_bias = TensorShard(build, f"{path}.{POOL_BIAS}") if config.pool > 1 else None

    def store(
        self,
        x: Tensor,
        latents: Tensor | None,
        keys: Tensor,
        cos_sin: Tensor | None,
        batch: ForwardBatch,
        num_choosing: int,
        logs: Tensor | None = None,
    ) -> Choice | None:
        """Store the tokens' index keys. Returns the arguments of `choose` for the first `num_choosing` tokens; None if
        there are none. x: [T, H], the block's input; latents: [T, Q], unless queries are projected from `x`; keys: [T,
        E], projected, or with pools [T, 2 E], their gates behind them; logs: those of positions, for `HeadScales`."""
        config, spec = self.config, self.cache.spec
        keys, gates = keys[:, : config.head_dim], keys[:, config.head_dim :]
        queries = keys.new_empty(0, config.num_heads, config.head_dim)
        if num_choosing:  # adapters lie as the tokens of the whole step do
            chosen = x if latents is None else latents
            if batch.adapters is None:
                chosen = chosen[:num_choosing]
            if self.q_norm is not None:
                chosen = rms_norm(chosen, self.q_norm.weight, config.norm_eps, is_centered=True, bias=self.q_norm.bias)
            queries = self.wq_b(chosen, batch.token_adapters)[:num_choosing].unflatten(1, queries.shape[1:])
            if self.query_scales is not None:
                assert logs is not None
                queries.mul_(self.query_scales(logs[:num_choosing]))
        store_index_keys(
            queries,
            keys,
            cos_sin,
            batch.kv_cache.layer(self.cache.number)[0][:, :, 0, spec.index_place],
            batch.slot_mapping[spec.kv_group],
            weight=self.k_norm.weight,
            bias=self.k_norm.bias,
            eps=config.norm_eps,
            is_interleaved=config.is_interleaved,
            gates=gates if config.pool > 1 else None,
        )
        if num_choosing == 0:
            return None
        return queries, router_logits(x[:num_choosing], self.weights_proj.weight).sum(dim=0)

    def store_pools(self, batch: ForwardBatch) -> None:
        """Store the index keys of the pools that the tokens fill, if keys are chosen by pools."""
        if self.pool_bias is not None:
            assert batch.backend.chosen_keys is not None
            batch.backend.chosen_keys.store_pools(self.cache, self.pool_bias.weight, batch)

    def choose(self, choice: Choice, batch: ForwardBatch) -> None:
        """Choose the tokens' keys."""
        assert batch.backend.chosen_keys is not None
        batch.backend.chosen_keys.choose(self.cache, *choice, batch)


class LatentAttention(TokenMixer):
    """[T, H] → [T, N × size of a value], the input of `o_proj`."""

    cache: AttentionCache
    spec: AttentionSpec
    quantised_input = "in_proj"

    def __init__(
        self, build: BuildContext, path: str, config: LatentAttentionConfig, norm: NormConfig, cache: AttentionCache
    ) -> None:
        super().__init__(cache)
        self.config = config
        self.heads = LatentHeads(
            num_heads=self.spec.num_heads,
            plain_dim=config.plain_dim,
            rope_dim=config.rope_dim,
            latent_dim=config.latent_dim,
            is_interleaved=config.rope is not None and config.rope.is_interleaved,
        )
        self.query_size = config.query_rank or self.spec.num_heads * config.projected_dim
        self.in_proj = ColumnParallelLinear(build, f"{path}.in_proj", config.input_projections)
        self.q_norm: Norm | None = None
        self.q_b_proj: ColumnParallelLinear | None = None
        if config.query_rank is not None:
            self.q_norm = Norm(build, f"{path}.q_a_layernorm", norm)
            self.q_b_proj = ColumnParallelLinear(build, f"{path}.q_b_proj", ("q_b_proj",))
        self.gate_proj: ColumnParallelLinear | None = None
        if config.gate is not None and config.gate.is_of_heads:
            self.gate_proj = ColumnParallelLinear(build, f"{path}.{GATE}", (GATE,))
        self.indexer: Indexer | None = None
        if config.chooser is not None:
            self.indexer = Indexer(build, f"{path}.indexer", config.chooser, cache)
        self.kv_norm = None if config.shares_kv else Norm(build, f"{path}.kv_a_layernorm", norm)
        self.rotated_norm = Norm(build, f"{path}.{ROTATED_NORM}", norm) if config.norms_rotated else None
        self.from_latents = TensorShard(build, f"{path}.{FROM_LATENTS}.weight")
        self.o_proj = RowParallelLinear(build, f"{path}.o_proj")
        self.sinks = TensorShard(build, f"{path}.sinks") if config.has_sinks else None
        self.by_head = invariant_by_head if build.batch_invariant else by_head
        self.query_scales = query_scale_table(config.query_scaling, build.max_positions)
        self.head_scales = HeadScales(build, path) if config.scales_heads else None

    @property
    def reads_values(self) -> bool:
        return self.indexer is not None or self.gate_proj is not None

    def forward(self, x: Activations, angles: Angles, batch: ForwardBatch) -> Tensor:
        """Store the tokens' latents and rotated keys, and attend to those of all tokens."""
        config, heads = self.config, self.heads
        adapters = batch.token_adapters
        num_gates = heads.num_heads * config.value_dim if config.has_wide_gate else 0
        gates, projected = self.in_proj(x, adapters).tensor_split((num_gates,), dim=1)
        parts = self.query_size, projected.shape[1] - config.stored_dim
        queries, index_keys, latents = projected.tensor_split(parts, dim=1)
        sinks = None if self.sinks is None else self.sinks.weight
        cos_sin, choice = angles.of(config.rotation), None
        logs = None if self.head_scales is None else torch.log1p(batch.positions)
        # Decode rows come first; the queries of the others stay as they are where keys are projected.
        num_absorbed = batch.num_decoded_tokens if batch.shape.projects_latents else len(queries)
        query_latents = None if self.q_norm is None else rms_norm(queries, self.q_norm.weight, config.norm_eps)
        if self.indexer is not None:
            choice = self.indexer.store(values_of(x), query_latents, index_keys, cos_sin, batch, num_absorbed, logs)
        if self.q_b_proj is not None:
            assert query_latents is not None
            if config.gates_in_queries:
                query_latents = torch.cat((query_latents, queries), dim=1)
            queries = self.q_b_proj(query_latents, adapters)
        queries = queries.unflatten(1, (heads.num_heads, config.projected_dim))
        if config.gates_in_queries:
            gates = queries[..., config.query_dim :].flatten(1)
            queries = queries[..., : config.query_dim].contiguous()
        from_latents: Tensor = self.from_latents.weight
        weight = from_latents.view(heads.num_heads, -1, config.latent_dim)
        absorbed = queries.new_empty(num_absorbed, heads.num_heads, config.key_dim)
        plain = queries[:num_absorbed, :, : config.plain_dim]
        self.by_head(plain, weight[:, : config.plain_dim], absorbed[..., : config.latent_dim])
        if self.rotated_norm is not None:
            rotated = latents[:, config.latent_dim :]
            rotated.copy_(rms_norm(rotated.contiguous(), self.rotated_norm.weight, config.norm_eps))
        keys = self._store(queries, latents, cos_sin, absorbed, batch)
        if self.indexer is not None:
            self.indexer.store_pools(batch)  # those that began with copied keys, too
            if choice is not None:
                self.indexer.choose(choice, batch)
        projected_queries = queries[num_absorbed:]
        if (factors := self._query_factors(batch, logs)) is not None:
            absorbed.mul_(factors[:num_absorbed])
            projected_queries.mul_(factors[num_absorbed:])
        out: Tensor = queries.new_empty(len(queries), heads.num_heads, config.value_dim)
        if num_absorbed:
            attended = self._attend(absorbed, keys, sinks, batch)
            self.by_head(attended, weight[:, config.plain_dim :].transpose(1, 2), out[:num_absorbed])
        if batch.shape.projects_latents:
            assert batch.backend.projected is not None
            layer = AttentionLayer(self.spec, self.cache.number, sinks)
            batch.backend.projected.forward(layer, projected_queries, from_latents, batch, out[num_absorbed:])
        if self.gate_proj is not None:
            gates = self.gate_proj(values_of(x), adapters)
        return out.flatten(1) if config.gate is None else gate_values(out.flatten(1), gates)

    def _store(
        self, queries: Tensor, latents: Tensor, cos_sin: Tensor | None, absorbed: Tensor, batch: ForwardBatch
    ) -> Tensor | None:
        """Rotate queries, and store the tokens' keys unless an earlier layer has: see `rotate_and_store`."""
        config, spec = self.config, self.spec
        cache, values = batch.kv_cache.layer(self.cache.number)
        rows = cache if spec.index_dim == 0 else cache[..., : config.key_dim]
        scales, slots = batch.kv_cache.scales(self.cache.number), batch.slot_mapping[spec.kv_group]
        keep_keys = batch.backend.reads_new_keys and config.top_k is None
        if self.kv_norm is None:
            rotate_queries(queries, cos_sin, absorbed, self.heads)
            keys = stored_keys(rows, slots).to(queries.dtype) if keep_keys else None
        else:
            keys = rotate_and_store(
                queries,
                latents,
                cos_sin,
                absorbed,
                rows,
                None if scales is None else scales.k,
                slots,
                self.heads,
                weight=self.kv_norm.weight,
                eps=config.norm_eps,
                keep_keys=keep_keys,
            )
        if batch.key_copies is not None and (self.kv_norm is not None or self.indexer is not None):
            if self.indexer is not None:
                self.indexer.store_pools(batch)  # so that they are copied with their keys
            copy_keys(cache, values, scales, batch.key_copies.of_groups[spec.kv_group])
        return keys

    def _query_factors(self, batch: ForwardBatch, logs: Tensor | None) -> Tensor | None:
        """Return the factors on queries, [T, 1 or N, 1] float32; None: there are none. logs: as for `HeadScales`."""
        if self.head_scales is not None:
            assert logs is not None
            factors: Tensor = self.head_scales(logs)
            return factors
        return None if self.query_scales is None else self.query_scales(batch.positions)

    def _attend(self, absorbed: Tensor, keys: Tensor | None, sinks: Tensor | None, batch: ForwardBatch) -> Tensor:
        """Attend with absorbed queries [T, N, D] to all keys, or to chosen ones: → [T, N, L]. `keys`: the tokens' own,
        if the backend reads them."""
        layer = AttentionLayer(self.spec, self.cache.number, sinks)
        if self.config.top_k is not None:
            assert batch.backend.chosen_keys is not None
            return batch.backend.chosen_keys.attend(layer, absorbed, batch)
        values = absorbed if keys is None else keys[..., : self.config.latent_dim]
        return batch.backend.forward(layer, absorbed, keys, values, batch)
