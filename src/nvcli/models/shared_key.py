"""SharedKeyAttention: attention whose heads share one key for each token, which is its value, too, sharded over the
ranks by groups of heads. Each rank keeps the keys of all tokens, and makes all keys that stand for several tokens.

Shapes: T tokens, H hidden, N heads of this rank, D numbers of a head, Q numbers of the queries' latent vector, I index
heads of E numbers.
"""

from __future__ import annotations

from torch import Tensor, nn

from nvcli.attention.forward_batch import AttentionLayer, ForwardBatch
from nvcli.attention.spec import AttentionCache, AttentionSpec, CacheLayer
from nvcli.kernels.chosen_keys import KeyWeights
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.key_copies import copy_keys
from nvcli.kernels.norm import rms_norm
from nvcli.kernels.routing import router_logits
from nvcli.kernels.shared_keys import norm_rotate_store, turn, turn_back
from nvcli.models.grouped_output import GroupedOutput
from nvcli.models.layers import Angles, Norm, TokenMixer
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.mixers.shared_key import (
    COMPRESSOR,
    INDEX_QUERIES,
    INDEX_WEIGHTS,
    INDEXER,
    INPUT_PROJECTIONS,
    KEY_NORM,
    POSITION_BIAS,
    CompressionConfig,
    SharedKeyConfig,
)
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, TensorShard, values_of


class SharedKeyAttention(TokenMixer):
    """[T, H] → [T, N × D], the input of `o_proj`."""

    cache: AttentionCache
    spec: AttentionSpec
    quantised_input = "in_proj"

    def __init__(
        self, build: BuildContext, path: str, config: SharedKeyConfig, norm: NormConfig, cache: AttentionCache
    ) -> None:
        super().__init__(cache)
        self.config = config
        self.in_proj = ColumnParallelLinear(build, f"{path}.in_proj", config.input_projections)
        self.q_norm = Norm(build, f"{path}.q_a_norm", norm)
        self.q_b_proj = ColumnParallelLinear(build, f"{path}.q_b_proj", ("q_b_proj",))
        self.kv_norm = Norm(build, f"{path}.kv_norm", norm)
        self.sinks = TensorShard(build, f"{path}.sinks")
        self.compressor: Compressor | None = None
        if config.compression is not None:
            self.compressor = Compressor(build, path, config.compression, norm, cache)
        self.o_proj = GroupedOutput(build, path, config.num_groups // build.group.size)

    @property
    def reads_values(self) -> bool:
        return self.compressor is not None

    def forward(self, x: Activations, angles: Angles, batch: ForwardBatch) -> Tensor:
        """Store the tokens' keys, and attend to those of all tokens in the window, and to compressed keys."""
        config, adapters, cos_sin = self.config, batch.token_adapters, angles.of(self.config.rotation)
        assert cos_sin is not None
        latents, keys = self.in_proj(x, adapters).split([config.query_rank, config.head_dim], dim=1)
        query_latents = rms_norm(latents, self.q_norm.weight, config.norm_eps)
        queries = self.q_b_proj(query_latents, adapters).unflatten(1, (self.spec.num_heads, config.head_dim))
        cache, values = batch.kv_cache.layer(self.cache.number)
        scales = batch.kv_cache.scales(self.cache.number)
        stored = norm_rotate_store(
            queries,
            keys,
            cos_sin,
            cache,
            None if scales is None else scales.k,
            batch.slot_mapping[self.spec.kv_group],
            weight=self.kv_norm.weight,
            eps=config.norm_eps,
            keep_keys=batch.backend.reads_new_keys and self.compressor is None,
        )
        if batch.key_copies is not None:
            copy_keys(cache, values, scales, batch.key_copies.of_groups[self.spec.kv_group])
        if self.compressor is not None:
            self.compressor(values_of(x), query_latents, cos_sin, angles.table(config.rotation), batch)
        results = self._attend(queries, stored, batch)
        turn_back(results, cos_sin)
        return results.flatten(1)

    def _attend(self, queries: Tensor, keys: Tensor | None, batch: ForwardBatch) -> Tensor:
        """Attend to the keys of the window, and to compressed ones: [T, N, D] → the same shape. `keys`: the tokens' own
        [T, 1, D], if the backend reads them."""
        layer = AttentionLayer(self.spec, self.cache.number, self.sinks.weight)
        if self.compressor is not None:
            assert batch.backend.chosen_keys is not None
            return batch.backend.chosen_keys.attend(layer, queries, batch)
        values = queries if keys is None else keys
        return batch.backend.forward(layer, queries, keys, values, batch)


class _KeyMaker(nn.Module):
    """The weights of one kind of keys."""

    def __init__(self, build: BuildContext, path: str, norm: NormConfig) -> None:
        super().__init__()
        self.bias = TensorShard(build, f"{path}.{POSITION_BIAS}")
        self.norm = Norm(build, f"{path}.{KEY_NORM}", norm)
        self.eps = norm.eps

    @property
    def weights(self) -> KeyWeights:
        return KeyWeights(self.bias.weight, self.norm.weight, self.eps)


class Compressor(nn.Module):
    """Stores the values and gates of a layer's tokens, and the compressed keys that they complete."""

    def __init__(
        self, build: BuildContext, path: str, config: CompressionConfig, norm: NormConfig, cache: AttentionCache
    ) -> None:
        """`path` and `cache`: those of the token mixer."""
        super().__init__()
        self.config, self.cache = config, cache
        modules = (COMPRESSOR, INDEXER)[: len(config.sizes(cache.spec.head_dim))]
        projections = tuple(f"{module}.{name}" for module in modules for name in INPUT_PROJECTIONS)
        self.in_proj = ColumnParallelLinear(build, f"{path}.in_proj", projections)
        self.key_maker = _KeyMaker(build, f"{path}.{COMPRESSOR}", norm)
        self.index_key_maker: _KeyMaker | None = None
        if config.index_dim:
            self.index_key_maker = _KeyMaker(build, f"{path}.{INDEXER}", norm)
            self.index_queries = ColumnParallelLinear(build, f"{path}.{INDEXER}.{INDEX_QUERIES}", (INDEX_QUERIES,))
            self.index_weights = TensorShard(build, f"{path}.{INDEXER}.{INDEX_WEIGHTS}.weight")

    def forward(self, x: Tensor, query_latents: Tensor, cos_sin: Tensor, angles: Tensor, batch: ForwardBatch) -> None:
        """Store the tokens' numbers and the keys of the windows that they fill, and choose the tokens' keys.

        x: [T, H], the block's input; query_latents: [T, Q]; cos_sin: [T, R] float32, the angles of the tokens; angles:
        [positions, R] float32, those of all positions.
        """
        chosen_keys = batch.backend.chosen_keys
        assert chosen_keys is not None
        compressed = self.cache.spec.compressed
        assert compressed is not None
        makers = filter(None, (self.key_maker, self.index_key_maker))
        adapters, kinds = batch.token_adapters, [maker.weights for maker in makers]
        chosen_keys.store_compressed(self.cache, self.in_proj(x, adapters), kinds, angles, batch)
        if self.index_key_maker is None:
            return
        queries = self.index_queries(query_latents, adapters).unflatten(1, (-1, self.config.index_dim))
        turn(queries, cos_sin)
        of_heads = router_logits(x, self.index_weights.weight).sum(dim=0)
        chosen_keys.choose(CacheLayer(compressed.keys, self.cache.number), queries, of_heads, batch)
