"""ChosenKeys: attention of each token to a choice of its keys, beside any backend.

An indexer chooses the keys of a step's tokens in one layer; that layer attends to them, and so may those after it.
Positions are chosen, not places in the cache, so that layers of other KV groups can read them. Everything is planned
and computed on the device from the batch's tensors, for decode rows and chunks alike. Chunks that see no more keys than
would be chosen may be attended to projected latents instead (`projected_latents.py`): then decode rows alone choose.
Latents of usual sizes are attended by the kernel that Hopper GPUs have for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nvcli.attention.backend import AttentionCase
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.kv_layout import choice_score_rows
from nvcli.attention.spec import AttentionSpec, Geometry
from nvcli.errors import ConfigError
from nvcli.kernels.chosen_keys import (
    TokenKeys,
    attend_chosen,
    choose_keys,
    expand_pools,
    expand_rows,
    num_pools,
    pool_keys,
    split_rows,
)
from nvcli.kernels.whole_numbers import next_power_of_2

if TYPE_CHECKING:
    from nvcli.kernels.triton.attention.latent_shares import HopperLatents


def check_sizes(case: AttentionCase) -> None:
    """Raise ConfigError if the GPU has no kernel for a layer's keys."""
    for spec in case.specs if case.device.type == "cuda" else ():
        sizes = spec.result_dim, 0 if spec.row_heads else spec.key_dim - spec.result_dim
        if spec.top_k is not None and any(size < 16 or size != next_power_of_2(size) for size in filter(None, sizes)):
            raise ConfigError(
                f"attention to chosen keys of {sizes[0]} numbers and {sizes[1]} rotated ones has no kernel: both must "
                "be powers of 2 from 16 on, of which the latter may be 0; with `max_model_len` up to "
                f"{spec.top_k:,} all keys are attended"
            )


class ChosenKeys:
    """The choices of a step, in memory that is allocated once."""

    def __init__(self, case: AttentionCase, chosen: Sequence[AttentionSpec]) -> None:
        """`chosen`: the kinds of layers with a choice. All that choose do so by the same pools."""
        top_k = max(spec.top_k or 0 for spec in chosen)
        num_choices = max(1, *(spec.row_heads for spec in chosen))
        self._pools = max((spec.index_pools for spec in chosen), key=lambda pools: pools.size)
        tokens, device = case.max_num_batched_tokens, case.device
        self._seen = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._slots = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._chosen = torch.zeros(num_choices, tokens, top_k, dtype=torch.int32, device=device)
        self._counts = self._seen  # those of a choice, which kernels bound by its size
        if self._pools.size > 1:
            most = self._pools.most_chosen(top_k)
            self._chosen_pools = torch.zeros(tokens, most, dtype=torch.int32, device=device)
            self._counts = torch.zeros_like(self._seen)
        num_rows = choice_score_rows(case.max_model_len, tokens) if device.type == "cuda" else 0
        self._scores = torch.empty(num_rows, case.max_model_len, dtype=torch.float32, device=device)
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
        if batch.shape.projects_latents:  # by all but the decode rows
            num_tokens = batch.num_decoded_tokens
        for attention in self._on_hopper.values():
            if attention.takes(num_tokens):
                attention.plan(counts[:num_tokens], slots[:num_tokens])

    def store_pools(self, spec: AttentionSpec, layer: int, bias: Tensor, batch: ForwardBatch) -> None:
        """Store the index keys of the pools that a step's tokens fill, in a layer whose index keys and gates are stored
        already. bias: as for `pool_keys`."""
        tokens, _ = self._of(spec, batch, self._seen[: batch.num_tokens])
        pool_keys(self._index_numbers(spec, layer, batch), tokens, bias)

    def choose(
        self, spec: AttentionSpec, layer: int, queries: Tensor, weights: Tensor | None, batch: ForwardBatch
    ) -> None:
        """Choose the keys of the first tokens in a layer that has index keys, which are stored already, and those of
        pools. queries: [first tokens, index heads, size of an index key]; weights: [first tokens, index heads] float32,
        or None: each head has a choice of its own."""
        num_tokens, pools = len(queries), spec.index_pools
        keys = self._index_numbers(spec, layer, batch)[..., -queries.shape[2] :]
        by_choice = [queries] if weights is not None else queries.transpose(0, 1).unsqueeze(2).contiguous()
        for number, of_choice in enumerate(by_choice):
            tokens, chosen = self._of(spec, batch, self._seen[:num_tokens], number)
            found = chosen if pools.size == 1 else self._chosen_pools[:num_tokens]
            choose_keys(of_choice, weights, keys, tokens, found, self._scores, pools)
            if pools.size > 1:
                expand_pools(found, tokens, chosen, pools)

    def attend(
        self, spec: AttentionSpec, layer: int, queries: Tensor, batch: ForwardBatch, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend to the keys that this layer or the last one before it has chosen. queries: [first tokens, num_heads,
        size of a key]; sinks: as for `AttentionBackend.forward` → [first tokens, num_heads, spec.result_dim]."""
        if spec.row_heads:
            assert sinks is None, "no family has them"
            return self._attend_by_heads(spec, layer, queries, batch)
        keys = batch.kv_cache.layer(layer)[0][..., : queries.shape[2]]
        out = torch.empty(*queries.shape[:2], spec.result_dim, dtype=queries.dtype, device=queries.device)
        tokens, chosen = self._of(spec, batch, self._counts[: len(queries)])
        attention = self._on_hopper.get((spec.geometry, spec.top_k))
        if attention is not None and attention.takes(len(queries)):
            attention.run_chosen(queries, keys, tokens.tables, chosen, out, scale=spec.scale, sinks=sinks)
        else:
            attend_chosen(queries, keys[:, :, 0], tokens, chosen, out, scale=spec.scale, sinks=sinks)
        return out

    def _attend_by_heads(self, spec: AttentionSpec, layer: int, queries: Tensor, batch: ForwardBatch) -> Tensor:
        """Do what `attend` does where each KV head has made a choice."""
        keys, values = split_rows(batch.kv_cache.layer(layer)[0][:, :, 0, : spec.key_dim], spec.row_heads)
        by_head = queries.view(len(queries), spec.row_heads, -1, spec.row_dim).transpose(0, 1).contiguous()
        out = torch.empty_like(by_head)
        for head, of_head in enumerate(by_head):
            tokens, chosen = self._of(spec, batch, self._counts[: len(queries)], head)
            attend_chosen(
                of_head, keys[:, :, head], tokens, chosen, out[head], scale=spec.scale, values=values[:, :, head]
            )
        return out.transpose(0, 1).flatten(1, 2)

    def _index_numbers(self, spec: AttentionSpec, layer: int, batch: ForwardBatch) -> Tensor:
        """Return what tokens keep for the layer's choice, [blocks, block_size, spec.index_dim or less]."""
        return batch.kv_cache.layer(layer)[0][:, :, 0, spec.index_place]

    def _of(
        self, spec: AttentionSpec, batch: ForwardBatch, counts: Tensor, number: int = 0
    ) -> tuple[TokenKeys, Tensor]:
        """Return the keys of a batch's first tokens, each of which sees or has chosen `counts` of them, and their
        positions in the choice of this number, [first tokens, spec.top_k]."""
        assert spec.top_k is not None
        tokens = TokenKeys(counts, self._slots[: len(counts)], batch.block_tables[spec.kv_group])
        return tokens, self._chosen[number, : len(counts), : spec.top_k]


def _on_hopper(case: AttentionCase) -> dict[tuple[Geometry, int | None], HopperLatents]:
    """Make the attention by the kernel for Hopper GPUs, for each kind of layers that it serves."""
    from nvcli.attention.triton_inputs import attention_shape
    from nvcli.kernels.triton.attention.latent_shares import HopperLatents, serves_latents

    found: dict[tuple[Geometry, int | None], HopperLatents] = {}
    for spec in case.specs:
        shape = attention_shape(
            case, (spec.num_heads, spec.num_kv_heads, spec.key_dim, spec.result_dim, spec.has_values)
        )
        if spec.top_k is not None and not spec.row_heads and serves_latents(shape):
            found[spec.geometry, spec.top_k] = HopperLatents(
                shape, max_rows=case.max_num_batched_tokens, top_k=spec.top_k
            )
    return found
