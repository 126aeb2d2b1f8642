"""ChosenKeys: attention of each token to a choice of its keys, beside any backend.

An indexer chooses the keys of a step's tokens in one layer; that layer attends to them, and so may those after it.
Positions are chosen, not places in the cache, so that layers of other KV groups can read them. Everything is planned
and computed on the device from the batch's tensors, for decode rows and chunks alike. Chunks that see no more keys than
would be chosen may be attended to projected latents instead (`projected_latents.py`): then decode rows alone choose.
Latents of usual sizes are attended by the kernel that Hopper GPUs have for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nvcli.attention.backend import AttentionCase
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.kv_layout import choice_score_rows
from nvcli.attention.spec import AttentionSpec, Geometry
from nvcli.errors import ConfigError
from nvcli.kernels.chosen_keys import TokenKeys, attend_chosen, choose_keys, expand_rows
from nvcli.kernels.whole_numbers import next_power_of_2

if TYPE_CHECKING:
    from nvcli.kernels.triton.attention.latent_shares import LatentAttention


def check_sizes(case: AttentionCase) -> None:
    """Raise ConfigError if the GPU has no kernel for a layer's keys."""
    for spec in case.specs if case.device.type == "cuda" else ():
        sizes = spec.result_dim, spec.key_dim - spec.result_dim
        if spec.top_k is not None and any(size < 16 or size != next_power_of_2(size) for size in sizes):
            raise ConfigError(
                f"attention to chosen keys of {sizes[0]} numbers and {sizes[1]} rotated ones has no kernel: both must "
                f"be powers of 2 from 16 on; with `max_model_len` up to {spec.top_k:,} all keys are attended"
            )


class ChosenKeys:
    """The choices of a step, in memory that is allocated once."""

    def __init__(self, case: AttentionCase, top_k: int) -> None:
        """`top_k`: the most keys of a token, in any layer."""
        tokens, device = case.max_num_batched_tokens, case.device
        self._seen = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._slots = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._chosen = torch.zeros(tokens, top_k, dtype=torch.int32, device=device)
        num_rows = choice_score_rows(case.max_model_len, tokens) if device.type == "cuda" else 0
        self._scores = torch.empty(num_rows, case.max_model_len, dtype=torch.float32, device=device)
        self._on_hopper = _on_hopper(case) if device.type == "cuda" else {}

    def plan(self, batch: ForwardBatch) -> None:
        """Find the keys of a step's tokens, on the device."""
        num_rows, num_tokens = len(batch.slots), batch.num_tokens
        if batch.shape.projects_latents:  # all but the decode rows
            num_rows, num_tokens = batch.num_decoded_rows, batch.num_decoded_tokens
        seen, slots = self._seen[:num_tokens], self._slots[:num_tokens]
        seen.zero_()
        starts, seq_lens = batch.query_start_loc[: num_rows + 1], batch.seq_lens[:num_rows]
        expand_rows(starts, seq_lens, batch.slots[:num_rows], seen, slots)
        for attention in self._on_hopper.values():
            if attention.takes(num_tokens):
                attention.plan(seen, slots)

    def choose(self, spec: AttentionSpec, layer: int, queries: Tensor, weights: Tensor, batch: ForwardBatch) -> None:
        """Choose the keys of the first tokens in a layer that has index keys, which are stored already. queries:
        [first tokens, index heads, spec.index_dim]; weights: [first tokens, index heads] float32."""
        assert spec.top_k is not None
        keys = batch.kv_cache.layer(layer)[0][:, :, 0, -spec.index_dim :]
        choose_keys(queries, weights, keys, *self._of(spec, batch, len(queries)), self._scores)

    def attend(
        self, spec: AttentionSpec, layer: int, queries: Tensor, batch: ForwardBatch, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend to the keys that this layer or the last one before it has chosen. queries: [first tokens, num_heads,
        size of a key]; sinks: as for `AttentionBackend.forward` → [first tokens, num_heads, spec.value_dim]."""
        keys = batch.kv_cache.layer(layer)[0][..., : queries.shape[2]]
        out = torch.empty(*queries.shape[:2], spec.result_dim, dtype=queries.dtype, device=queries.device)
        tokens, chosen = self._of(spec, batch, len(queries))
        attention = self._on_hopper.get((spec.geometry, spec.top_k))
        if attention is not None and attention.takes(len(queries)):
            attention.run_chosen(queries, keys, tokens.tables, chosen, out, scale=spec.scale, sinks=sinks)
        else:
            attend_chosen(queries, keys[:, :, 0], tokens, chosen, out, scale=spec.scale, sinks=sinks)
        return out

    def _of(self, spec: AttentionSpec, batch: ForwardBatch, num_tokens: int) -> tuple[TokenKeys, Tensor]:
        """Return the keys of a batch's first tokens, and their chosen positions, [num_tokens, spec.top_k]."""
        assert spec.top_k is not None
        tables = batch.block_tables[spec.kv_group]
        tokens = TokenKeys(self._seen[:num_tokens], self._slots[:num_tokens], tables)
        return tokens, self._chosen[:num_tokens, : spec.top_k]


def _on_hopper(case: AttentionCase) -> dict[tuple[Geometry, int | None], LatentAttention]:
    """Make the attention by the kernel for Hopper GPUs, for each kind of layers that it serves."""
    from nvcli.attention.triton_inputs import attention_shape
    from nvcli.kernels.triton.attention.latent_shares import LatentAttention, serves_latents

    found: dict[tuple[Geometry, int | None], LatentAttention] = {}
    for spec in case.specs:
        shape = attention_shape(case, (spec.num_heads, spec.num_kv_heads, spec.key_dim, spec.value_dim, None))
        if spec.top_k is not None and serves_latents(shape):
            found[spec.geometry, spec.top_k] = LatentAttention(
                shape, max_rows=case.max_num_batched_tokens, top_k=spec.top_k
            )
    return found
