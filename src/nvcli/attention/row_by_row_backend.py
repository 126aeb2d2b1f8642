"""The `torch` backend of runs that are batch-invariant: every token is attended alone, by calls whose shapes follow
from its position.

It is slow, and serves CPUs: for tests, and for models that are small enough. Keys and values are read from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvcli.attention.backend import AttentionBackend, AttentionCase, NewKV, output_buffer
from nvcli.attention.forward_batch import AttentionLayer, ForwardBatch
from nvcli.attention.spec import first_seen
from nvcli.attention.torch_backend import TorchBackend, softmax_attention
from nvcli.kernels.whole_numbers import ceil_div

_Kind = tuple[int | None, int]
"""The window and the KV group, which determine a plan."""


@dataclass(frozen=True, slots=True)
class _Token:
    """The keys that a token sees."""

    block_ids: Tensor
    """[blocks] int64."""
    keys: slice
    """The keys in those blocks that the token sees; empty for a token that attends to nothing."""


class RowByRowBackend(AttentionBackend):
    """Attention in plain torch, one token at a time, on any device."""

    name = "torch"

    def __init__(self, case: AttentionCase) -> None:
        self._block_size = case.block_size
        self._kinds = list(dict.fromkeys((spec.window, spec.kv_group) for spec in case.specs))
        self._decodes: dict[_Kind, list[_Token]] = {}
        self._chunks: dict[_Kind, list[_Token]] = {}

    @classmethod
    def unsupported(cls, case: AttentionCase) -> list[str]:
        return TorchBackend.unsupported(case)

    def plan_decode_on_device(self, batch: ForwardBatch) -> None:
        ends = batch.seq_lens[: batch.num_decoded_rows].tolist()
        self._decodes = {
            kind: [self._lay_out(kind, batch, row, end) for row, end in enumerate(ends)] for kind in self._kinds
        }

    def plan_prefill_on_device(self, batch: ForwardBatch) -> None:
        first = batch.num_decoded_rows
        lens = batch.seq_lens[first:].tolist()
        counts = batch.num_tokens_host[first:].tolist()
        ends = [
            (row, min(end, length))  # padding rows may have more tokens than keys
            for row, (count, length) in enumerate(zip(counts, lens, strict=True), first)
            for end in range(max(length, count) - count + 1, max(length, count) + 1)
        ]
        self._chunks = {kind: [self._lay_out(kind, batch, row, end) for row, end in ends] for kind in self._kinds}

    def decode(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        return self._attend(layer, q, batch, self._decodes, out)

    def prefill(self, layer: AttentionLayer, q: Tensor, new: NewKV, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        return self._attend(layer, q, batch, self._chunks, out)

    def _lay_out(self, kind: _Kind, batch: ForwardBatch, row: int, end: int) -> _Token:
        """Find the keys of the token at position `end` - 1 of a row's request."""
        window, kv_group = kind
        first = first_seen(end - 1, window)
        first_block = first // self._block_size
        columns = slice(first_block, ceil_div(end, self._block_size))
        skipped = first_block * self._block_size
        block_ids = batch.block_tables[kv_group, batch.slots[row], columns].long()
        return _Token(block_ids, slice(first - skipped, max(end, 0) - skipped))

    def _attend(
        self,
        layer: AttentionLayer,
        q: Tensor,
        batch: ForwardBatch,
        plans: dict[_Kind, list[_Token]],
        out: Tensor | None,
    ) -> Tensor:
        spec, number, sinks, bias = layer
        assert bias is None, "no batch-invariant run has one"
        tokens = plans[spec.window, spec.kv_group]
        out = output_buffer(out, q, spec)
        heads = q.view(len(q), 1, spec.num_kv_heads, -1, spec.head_dim)  # [T, 1, KV, G, D]
        results = out.view(*heads.shape[:-1], spec.result_dim)
        by_head = None if sinks is None else sinks.view(spec.num_kv_heads, -1, 1)
        for query, token, result in zip(heads, tokens, results, strict=False):
            k, v = (
                cache.index_select(0, token.block_ids).flatten(0, 1)[token.keys].transpose(0, 1).unsqueeze(0)
                for cache in batch.kv_cache.layer(number)
            )
            result.copy_(
                softmax_attention(spec, query.contiguous(), k, v, mask=None, is_causal=False, sinks=by_head)
                if k.shape[2]
                else torch.zeros_like(result)
            )
        out[len(tokens) :].zero_()  # padding
        return out
