"""NGramLookup: adds vectors of the n-grams that end in each token to the residual streams (`mixers/ngram_lookup.py`).

The layer's recurrent state has the convolution's last inputs, and behind them the ids of those tokens. Shapes: T
tokens, N streams, H hidden, I hashes of a token, D numbers of a row of the table, V = I × D.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import StateCache
from nvcli.kernels.causal_conv import causal_conv
from nvcli.kernels.embedding import embed_part
from nvcli.kernels.ngrams import ID_BYTES, LookupNorms, NGramHashes, gate_lookup, ngram_rows
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.layers import CachedModule, Norm
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.mixers.ngram_lookup import ID_CHANNELS, KEYS_AND_VALUES, STREAM_NORMS, TABLE, NGramLookupConfig
from nvcli.models.parallel import BuildContext, ColumnParallelLinear
from nvcli.models.weights import DerivedModule, WeightModule, WeightSource, empty_parameter, stacked_rows


class NGramLookup(CachedModule):
    """[T, N × H], which is changed in place."""

    cache: StateCache

    def __init__(
        self, build: BuildContext, path: str, config: NGramLookupConfig, norm: NormConfig, cache: StateCache
    ) -> None:
        super().__init__(cache)
        self.config, own = config, build.of_own_rows()
        self.table = NGramTable(build, path, config)
        self.in_proj = ColumnParallelLinear(own, f"{path}.in_proj", KEYS_AND_VALUES)
        self.key_norm, self.query_norm, self.input_norm = (Norm(own, f"{path}.{name}", norm) for name in STREAM_NORMS)
        self.eps = norm.eps
        self.conv = _Taps(own, f"{path}.conv1d", ID_CHANNELS)

    def forward(self, streams: Tensor, batch: ForwardBatch) -> None:
        """Add the vectors to the streams, and store what later tokens read; for rows with drafts, store what is needed
        to advance their states later."""
        width, (pool, _, rows, kept) = self.config.width, batch.states(self.cache)
        places = self.table.places(batch.input_ids, pool[..., width : width + ID_BYTES], rows)
        projected = self.in_proj(self.table(places), batch.token_adapters)
        norms = LookupNorms(self.key_norm.weight, self.query_norm.weight, self.input_norm.weight)
        gated, inputs = gate_lookup(projected, streams, batch.input_ids, norms, self.eps, ID_CHANNELS)
        convolved = causal_conv(inputs, self.conv.weight.squeeze(1), pool, rows, kept, dilation=self.config.order)
        streams.add_(gated).add_(convolved[:, :width])


class NGramTable(WeightModule, DerivedModule):
    """The places of tokens' rows [T, I] → [T, V]. The rows are cut over the ranks as those of a vocabulary are."""

    factors: Tensor
    """[order]."""
    sizes: Tensor
    """[I], the rows of each hash."""
    firsts: Tensor
    """[I], the first of them."""

    def __init__(self, build: BuildContext, path: str, config: NGramLookupConfig) -> None:
        super().__init__()
        self.config, self.group, self.has_own_rows = config, build.group, build.has_own_rows
        self.parts = [tensor for name, tensor in build.tensors.items() if name.startswith(f"{path}.{TABLE}.")]
        self.rows = ceil_div(config.num_rows, self.group.size)
        self.weight = empty_parameter(self.parts[0], self.rows, config.head_dim)
        for name, count in (("factors", config.order), ("sizes", config.num_hashes), ("firsts", config.num_hashes)):
            self.register_buffer(name, torch.empty(count, dtype=torch.int64), persistent=False)

    def derive(self, device: torch.device) -> None:
        config = self.config
        numbers = (config.factors, config.head_rows, config.first_rows)
        self.factors, self.sizes, self.firsts = (torch.tensor(one, device=device) for one in numbers)

    def weight_sources(self) -> Iterator[WeightSource]:
        begin = self.group.rank * self.rows
        starts = accumulate((part.shape[0] for part in self.parts), initial=0)
        own = []
        for part, start in zip(self.parts, starts, strict=False):
            first, end = (min(max(0, at - start), part.shape[0]) for at in (begin, begin + self.rows))
            own.append((part, (slice(first, end), slice(0, part.shape[1]))))
        return stacked_rows("weight", own)

    def places(self, ids: Tensor, kept: Tensor, rows: StateRows) -> Tensor:
        """Return the rows that tokens have, [T, I] int64; the arguments are those of `ngram_rows`."""
        hashes = NGramHashes(self.factors, self.sizes, self.firsts)
        return ngram_rows(ids, kept, rows, hashes, self.config.separator)

    def forward(self, places: Tensor) -> Tensor:
        shape = len(places), self.config.vector_size
        if self.group.size == 1:
            return F.embedding(places, self.weight).view(shape)
        if self.has_own_rows:
            part = self._part(self.group.gather_rows(places))
            return self.group.scatter_sum(part.view(-1, shape[1]))
        buffer = self.group.partial_sum_buffer(shape, self.weight.dtype)
        out = None if buffer is None else buffer.view(-1, self.config.head_dim)
        return self.group.sum(self._part(places, out).view(shape))

    def _part(self, places: Tensor, out: Tensor | None = None) -> Tensor:
        """Return this rank's rows of [T, I] places, and zeros in place of others, [T × I, D], in `out` if given."""
        return embed_part(places.flatten(), self.weight, self.group.rank * self.rows, out)


class _Taps(WeightModule):
    """The taps of a convolution, [channels, 1, taps], and zeros for channels behind them."""

    def __init__(self, build: BuildContext, path: str, num_others: int) -> None:
        super().__init__()
        self.tensor = build.tensors[f"{path}.weight"]
        channels, *others = self.tensor.shape
        self.weight = empty_parameter(self.tensor, channels + num_others, *others)

    def weight_sources(self) -> Iterator[WeightSource]:
        return stacked_rows("weight", [(self.tensor, self.tensor.shard(0, 1))])
