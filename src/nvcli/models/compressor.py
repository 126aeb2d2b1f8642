"""Compressor: makes the keys that stand for several tokens each, and chooses among them; every rank makes all of them.

Shapes: T tokens, H hidden, Q size of the queries' latent vector, I index heads of E numbers.
"""

from __future__ import annotations

from torch import Tensor, nn

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import AttentionCache, CacheLayer
from nvcli.kernels.chosen_keys import KeyWeights
from nvcli.kernels.routing import router_logits
from nvcli.kernels.shared_keys import turn
from nvcli.models.layers import Norm
from nvcli.models.mixers.compression import (
    COMPRESSOR,
    INDEX_QUERIES,
    INDEX_WEIGHTS,
    INDEXER,
    INPUT_PROJECTIONS,
    KEY_NORM,
    POSITION_BIAS,
    CompressionConfig,
)
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, TensorShard


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
    """Stores what a layer's tokens give to the keys of their windows, and those keys that they complete."""

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
