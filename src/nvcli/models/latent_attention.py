"""LatentAttention: multi-head latent attention with absorbed queries, sharded over the ranks by heads.

Each rank keeps the latents of all tokens. Shapes: T tokens, H hidden, N heads of this rank, L size of a latent vector,
R rotated numbers, D = L + R numbers of a key in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import AttentionSpec
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.invariant_linear import invariant_by_head
from nvcli.kernels.key_copies import copy_keys
from nvcli.kernels.latent_types import LatentHeads
from nvcli.kernels.latents import rotate_and_store
from nvcli.kernels.norm import rms_norm
from nvcli.models.layers import Angles, Norm, TokenMixer
from nvcli.models.mixers.latent_attention import FROM_LATENTS, LATENTS, LatentAttentionConfig
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, RowParallelLinear, TensorShard
from nvcli.models.qkv import query_scale_table


class LatentAttention(TokenMixer):
    """[T, H] → [T, N × size of a value], the input of `o_proj`."""

    spec: AttentionSpec

    def __init__(
        self,
        build: BuildContext,
        path: str,
        config: LatentAttentionConfig,
        norm: NormConfig,
        spec: AttentionSpec,
        cache_layer: int,
    ) -> None:
        super().__init__(spec, cache_layer)
        self.config = config
        self.heads = LatentHeads(
            num_heads=spec.num_heads,
            plain_dim=config.plain_dim,
            rope_dim=config.rope_dim,
            latent_dim=config.latent_dim,
            is_interleaved=config.rope is not None and config.rope.is_interleaved,
        )
        self.in_proj = ColumnParallelLinear(build, f"{path}.in_proj", (config.first_projection, LATENTS))
        self.q_norm: Norm | None = None
        self.q_b_proj: ColumnParallelLinear | None = None
        if config.query_rank is not None:
            self.q_norm = Norm(build, f"{path}.q_a_layernorm", norm)
            self.q_b_proj = ColumnParallelLinear(build, f"{path}.q_b_proj", ("q_b_proj",))
        self.kv_norm = Norm(build, f"{path}.kv_a_layernorm", norm)
        self.from_latents = TensorShard(build, f"{path}.{FROM_LATENTS}.weight")
        self.o_proj = RowParallelLinear(build, f"{path}.o_proj")
        self.by_head = invariant_by_head if build.batch_invariant else _by_head
        self.query_scales = query_scale_table(config.query_scaling, build.max_positions)

    @property
    def input_proj(self) -> ColumnParallelLinear:
        return self.in_proj

    def forward(self, x: Activations, angles: Angles, batch: ForwardBatch) -> Tensor:
        """Store the tokens' latents and rotated keys, and attend to those of all tokens."""
        config, heads = self.config, self.heads
        adapters = batch.token_adapters
        projected = self.in_proj(x, adapters)
        queries, latents = projected[:, : -config.key_dim], projected[:, -config.key_dim :]
        if self.q_b_proj is not None:
            assert self.q_norm is not None
            queries = self.q_b_proj(rms_norm(queries, self.q_norm.weight, config.norm_eps), adapters)
        queries = queries.unflatten(1, (heads.num_heads, config.query_dim))
        from_latents: Tensor = self.from_latents.weight
        weight = from_latents.view(heads.num_heads, -1, config.latent_dim)
        # Decode rows come first; the queries of the others stay as they are where keys are projected.
        num_absorbed = batch.num_decoded_tokens if batch.shape.projects_latents else len(queries)
        absorbed = queries.new_empty(num_absorbed, heads.num_heads, config.key_dim)
        plain = queries[:num_absorbed, :, : config.plain_dim]
        self.by_head(plain, weight[:, : config.plain_dim], absorbed[..., : config.latent_dim])
        cache, values = batch.kv_cache.layer(self.cache_layer)
        scales = batch.kv_cache.scales(self.cache_layer)
        keys = rotate_and_store(
            queries,
            latents,
            angles.of(config.rotation),
            absorbed,
            cache,
            None if scales is None else scales.k,
            batch.slot_mapping[self.spec.kv_group],
            heads,
            weight=self.kv_norm.weight,
            eps=config.norm_eps,
            keep_keys=batch.backend.reads_new_keys,
        )
        if batch.key_copies is not None:
            copy_keys(cache, values, scales, batch.key_copies.of_groups[self.spec.kv_group])
        projected_queries = queries[num_absorbed:]
        if self.query_scales is not None:
            scales = self.query_scales(batch.positions)
            absorbed = (absorbed * scales[:num_absorbed]).to(absorbed.dtype)
            projected_queries = (projected_queries * scales[num_absorbed:]).to(queries.dtype)
        out: Tensor = queries.new_empty(len(queries), heads.num_heads, config.value_dim)
        if num_absorbed:
            new_values = absorbed if keys is None else keys[..., : config.latent_dim]
            attended = batch.backend.forward(self.spec, self.cache_layer, absorbed, keys, new_values, batch)
            self.by_head(attended, weight[:, config.plain_dim :].transpose(1, 2), out[:num_absorbed])
        if batch.shape.projects_latents:
            assert batch.backend.projected is not None
            batch.backend.projected.forward(
                self.spec, self.cache_layer, projected_queries, from_latents, batch, out[num_absorbed:]
            )
        return out.flatten(1)


def _by_head(x: Tensor, weights: Tensor, out: Tensor) -> None:
    """Multiply each head by its own matrix: [T, N, in], [N, in, out] → `out` [T, N, out]."""
    torch.bmm(x.transpose(0, 1), weights, out=out.transpose(0, 1))
