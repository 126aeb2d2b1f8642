"""Indexer: the queries, keys and weights of heads by which a layer's keys are chosen; every rank computes all of them.

Shapes: T tokens, H hidden, Q size of the queries' latent vector, I heads of E numbers.
"""

from __future__ import annotations

from torch import Tensor, nn

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import AttentionCache
from nvcli.kernels.chosen_keys import store_index_keys
from nvcli.kernels.norm import rms_norm
from nvcli.kernels.routing import router_logits
from nvcli.models.mixers.indexer import POOL_BIAS, IndexerConfig
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, TensorShard, TensorShards
from nvcli.models.qkv import HeadScales

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
        """Store the tokens' index keys, and return what `choose` needs for the first `num_choosing` tokens; None
        without any. x: [T, H], the block's input; latents: [T, Q], unless queries are projected from `x`; keys: [T, E],
        projected, or with pools [T, 2 E], their gates behind them; logs: those of positions, for `HeadScales`."""
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
