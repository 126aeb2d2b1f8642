"""ChosenKeys: attention of each token to a choice of its keys, or to keys that stand for several tokens each and to
those of its window, beside any backend.

An indexer chooses the keys of a step's tokens in one layer; that layer attends to them, and so may those after it.
Positions are chosen, not places in the cache, so that layers of other KV groups can read them. Everything is planned
and computed on the device from the batch's tensors, for decode rows and chunks alike. Chunks that see no more keys than
would be chosen may be attended to projected latents instead (`projected_latents.py`): then decode rows alone choose.
Latents of usual sizes are attended by the kernel that Hopper GPUs have for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nvcli.attention.backend import AttentionCase
from nvcli.attention.choice_sizes import ChoiceKind, ChoiceSizes
from nvcli.attention.forward_batch import AttentionLayer, ForwardBatch
from nvcli.attention.spec import AttentionCache, AttentionSpec
from nvcli.errors import ConfigError
from nvcli.kernels.chosen_keys import (
    KeyWeights,
    TokenKeys,
    WindowKeys,
    attend_chosen,
    average_keys,
    choose_keys,
    expand_pools,
    expand_rows,
    num_pools,
    pool_keys,
    split_rows,
)
from nvcli.kernels.compressed_keys import compress_keys, store_inputs
from nvcli.kernels.whole_numbers import next_power_of_2

if TYPE_CHECKING:
    from nvcli.kernels.triton.attention.latent_shares import HopperLatents


def check_sizes(case: AttentionCase) -> None:
    """Raise ConfigError if the GPU has no kernel for a layer's keys."""
    for spec in case.specs if case.device.type == "cuda" else ():
        sizes = spec.result_dim, 0 if spec.row_heads else spec.key_dim - spec.result_dim
        if spec.is_beside_backends and any(size < 16 or size != next_power_of_2(size) for size in filter(None, sizes)):
            way_out = "" if spec.top_k is None else f"; with `max_model_len` up to {spec.top_k:,} all keys are attended"
            raise ConfigError(
                f"attention to chosen keys of {sizes[0]} numbers and {sizes[1]} rotated ones has no kernel: both must "
                f"be powers of 2 from 16 on, of which the latter may be 0{way_out}"
            )


class ChosenKeys:
    """The choices of a step, in memory that is allocated once."""

    def __init__(self, case: AttentionCase, specs: Sequence[AttentionSpec]) -> None:
        """`specs`: those of `case` that are not attended by a backend, as for `ChoiceSizes.of`."""
        tokens, device = case.max_num_batched_tokens, case.device
        sizes = ChoiceSizes.of(specs, case.max_model_len)
        self._pools = sizes.pools
        self._seen = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._slots = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._chosen = torch.zeros(sizes.num_choices, tokens, sizes.top_k, dtype=torch.int32, device=device)
        self._counts = self._seen  # those of a choice, which kernels bound by its size
        if self._pools.size > 1:
            self._chosen_pools = torch.zeros(tokens, sizes.most_pools, dtype=torch.int32, device=device)
            self._counts = torch.zeros_like(self._seen)
        self._of_rates = {rate: torch.zeros_like(self._seen) for rate in sizes.rates}
        """The number of keys that each token sees, by the number of tokens that share a key."""
        num_rows = sizes.score_rows(tokens) if device.type == "cuda" else 0
        self._scores = torch.empty(num_rows, sizes.most_scores, dtype=torch.float32, device=device)
        self._on_hopper = _on_hopper(case) if device.type == "cuda" else {}

    def plan(self, batch: ForwardBatch) -> None:
        """Find the keys of a step's tokens, on the device."""
        num_tokens = batch.num_tokens
        seen, slots, counts = (each[:num_tokens] for each in (self._seen, self._slots, self._counts))
        seen.zero_()
        expand_rows(batch.query_start_loc, batch.seq_lens, batch.slots, seen, slots)
        if self._pools.size > 1:  # all but those of pools that are not chosen
            left = (num_pools(seen, self._pools) - self._chosen_pools.shape[1]).clamp_(min=0)
            torch.sub(seen, left, alpha=self._pools.size, out=counts)
        for rate, of_rate in self._of_rates.items():
            torch.floor_divide(seen, rate, out=of_rate[:num_tokens])
        if batch.shape.projects_latents:  # by all but the decode rows
            num_tokens = batch.num_decoded_tokens
        for kind, attention in self._on_hopper.items():
            if attention.takes(num_tokens):
                own = self._of_rates.get(kind.rate, counts)[:num_tokens]
                attention.plan(own, slots[:num_tokens], near_seen=seen[:num_tokens] if kind.window else None)

    def store_pools(self, cache: AttentionCache, bias: Tensor, batch: ForwardBatch) -> None:
        """Store the index keys of the pools that a step's tokens fill, in a layer whose index keys and gates are stored
        already. bias: as for `pool_keys`."""
        tokens = self._tokens(cache.spec, batch, self._seen[: batch.num_tokens])
        pool_keys(_index_numbers(cache, batch), tokens, bias)

    def average_pools(self, cache: AttentionCache, weight: Tensor, eps: float, batch: ForwardBatch) -> None:
        """Store the index keys of the pools that a step's tokens fill, in a layer whose index keys and angles are
        stored already. weight, eps: as for `average_keys`."""
        tokens = self._tokens(cache.spec, batch, self._seen[: batch.num_tokens])
        average_keys(_index_numbers(cache, batch), tokens, weight, eps, cache.spec.index_pools.size)

    def store_compressed(
        self, cache: AttentionCache, rows: Tensor, kinds: Sequence[KeyWeights], angles: Tensor, batch: ForwardBatch
    ) -> None:
        """Store the numbers that compressed keys are made of, and the compressed keys that a step's tokens complete.

        rows: [T, numbers], values and gates for each of the `kinds` of keys, one kind after the other; angles: as for
        `compress_keys`.
        """
        kept = cache.spec.compressed
        assert kept is not None
        of_inputs, of_keys = kept
        inputs, keys = (batch.kv_cache.layer(cache.number, each.kv_group)[0][:, :, 0] for each in kept)
        store_inputs(rows, inputs, batch.slot_mapping[of_inputs.kv_group])
        tokens = self._tokens(of_inputs, batch, self._seen[: batch.num_tokens])
        first = first_key = 0
        for weights in kinds:
            end, end_key = first + 2 * weights.bias.shape[1], first_key + len(weights.norm)
            made, tables = keys[..., first_key:end_key], batch.block_tables[of_keys.kv_group]
            compress_keys(inputs[..., first:end], tokens, made, tables, angles, weights)
            first, first_key = end, end_key

    def choose(self, cache: AttentionCache, queries: Tensor, weights: Tensor | None, batch: ForwardBatch) -> None:
        """Choose the keys of the first tokens in a layer that has index keys, which are stored already, and those of
        pools. queries: [first tokens, index heads, size of an index key]; weights: [first tokens, index heads] float32,
        or None: each head has a choice of its own."""
        spec, num_tokens = cache.spec, len(queries)
        pools, keys = spec.index_pools, _index_numbers(cache, batch)[..., -queries.shape[2] :]
        tokens = self._tokens(spec, batch, self._of_rates.get(spec.rate, self._seen)[:num_tokens])
        by_choice = [queries] if weights is not None else queries.transpose(0, 1).unsqueeze(2).contiguous()
        for number, of_choice in enumerate(by_choice):
            chosen = self._chosen[number, :num_tokens, : spec.top_k]
            found = chosen if pools.size == 1 else self._chosen_pools[:num_tokens]
            choose_keys(of_choice, weights, keys, tokens, found, self._scores, pools)
            if pools.size > 1:
                expand_pools(found, tokens, chosen, pools)

    def attend(self, layer: AttentionLayer, queries: Tensor, batch: ForwardBatch) -> Tensor:
        """Attend to the keys that this layer or the last one before it has chosen, or to compressed ones. queries:
        [first tokens, num_heads, size of a key] → [first tokens, num_heads, spec.result_dim]."""
        spec, number, sinks, bias = layer
        assert bias is None, "no family has one"
        if spec.row_heads:
            assert sinks is None, "no family has them"
            return self._attend_by_heads(layer, queries, batch)
        num_tokens, size = len(queries), queries.shape[2]
        out = torch.empty(*queries.shape[:2], spec.result_dim, dtype=queries.dtype, device=queries.device)
        attended, window = spec.attended, None
        if spec.compressed is not None:
            assert spec.window is not None
            own = batch.kv_cache.layer(number)[0][:, :, 0]
            window = WindowKeys(own, self._tokens(spec, batch, self._seen[:num_tokens]), spec.window)
        keys = batch.kv_cache.layer(number, attended.kv_group)[0][..., :size]
        tokens = self._tokens(attended, batch, self._of_rates.get(attended.rate, self._counts)[:num_tokens])
        chosen = None if attended.top_k is None else self._chosen[0, :num_tokens, : attended.top_k]
        attention = self._on_hopper.get(ChoiceKind.of(spec))
        if attention is not None and attention.takes(num_tokens):
            attention.run_chosen(
                queries, keys, tokens.tables, chosen, out, scale=spec.scale, sinks=sinks, window=window
            )
        else:
            attend_chosen(queries, keys[:, :, 0], tokens, chosen, out, scale=spec.scale, sinks=sinks, window=window)
        return out

    def _attend_by_heads(self, layer: AttentionLayer, queries: Tensor, batch: ForwardBatch) -> Tensor:
        """Attend as `attend` does, where the keys of several KV heads stand side by side."""
        spec = layer.spec
        keys, values = split_rows(batch.kv_cache.layer(layer.number)[0][:, :, 0, : spec.key_dim], spec.row_heads)
        by_head = queries.view(len(queries), spec.row_heads, -1, spec.row_dim).transpose(0, 1).contiguous()
        out = torch.empty_like(by_head)
        tokens = self._tokens(spec, batch, self._counts[: len(queries)])
        for head, of_head in enumerate(by_head):
            chosen = self._chosen[0 if spec.shares_choice else head, : len(queries), : spec.top_k]
            attend_chosen(
                of_head, keys[:, :, head], tokens, chosen, out[head], scale=spec.scale, values=values[:, :, head]
            )
        return out.transpose(0, 1).flatten(1, 2)

    def _tokens(self, spec: AttentionSpec, batch: ForwardBatch, counts: Tensor) -> TokenKeys:
        """Return the keys of a batch's first tokens. `counts`: how many of them each token sees or has chosen."""
        return TokenKeys(counts, self._slots[: len(counts)], batch.block_tables[spec.kv_group])


def _index_numbers(cache: AttentionCache, batch: ForwardBatch) -> Tensor:
    """Return what tokens keep for the layer's choice, [blocks, block_size, spec.index_dim or less]."""
    return batch.kv_cache.layer(cache.number, cache.spec.kv_group)[0][:, :, 0, cache.spec.index_place]


def _on_hopper(case: AttentionCase) -> dict[ChoiceKind, HopperLatents]:
    """Make the attention by the kernel for Hopper GPUs, for each kind of layers that it serves."""
    from nvcli.attention.triton_inputs import attention_shape
    from nvcli.kernels.triton.attention.latent_shares import HopperLatents, serves_latents

    found: dict[ChoiceKind, HopperLatents] = {}
    for spec in case.specs:
        kind = ChoiceKind.of(spec)
        if not spec.is_beside_backends or spec.row_heads or kind in found:
            continue
        block_keys = spec.attended.block_keys(case.block_size)
        shape = replace(attention_shape(case, kind.geometry), block_size=block_keys)
        if serves_latents(shape):
            found[kind] = HopperLatents(
                shape, max_rows=case.max_num_batched_tokens, top_k=kind.top_k, window=kind.window
            )
    return found
