"""The `torch` backend: paged attention in plain torch on any device. It is the reference for the other backends.

A token at position p sees the keys at positions 0 .. p, or max(0, p - window + 1) .. p of a kind with a window; where a
kind attends both ways, also those behind it, up to its request's end or p + window - 1.

Speed matters on the CPU, where it is the backend of choice. Decode rows are sorted by the number of keys to read and
cut into groups of similar numbers, small enough that a group's keys and values stay in the processor's cache between
being gathered from their blocks and being read by `scaled_dot_product_attention`. The query heads that share a KV head
stand in the query-length dimension, so that keys and values are never repeated. All of this is laid out once a step for
each window and KV group, from lengths read off the device.

Chunks that share prefixes are attended together where a batch says so, as the reference for other backends. This
backend does not ask for it: on two cores, 64 chunks of 8 tokens after 2,048 take 98 ms instead of 70, because partial
softmaxes are written out.

Shapes: T tokens, D head_dim, KV heads of this rank, G = num_heads / KV query heads for each, L most keys of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nvcli.attention import written_softmax
from nvcli.attention.backend import AttentionBackend, AttentionCase, NewKV, output_buffer
from nvcli.attention.forward_batch import AttentionLayer, ForwardBatch
from nvcli.attention.kv_cache import NULL_BLOCK, KVCache
from nvcli.attention.spec import AttentionSpec, first_seen
from nvcli.attention.torch_segments import SharedRead, plan_prefix_reads, plan_shared_reads
from nvcli.kernels.distance_bias import bias_of_keys
from nvcli.kernels.fp8_kv import gather_blocks
from nvcli.kernels.whole_numbers import ceil_div

_GROUP_BYTES_CPU = 4 << 20
"""Gathered keys and values of one group: measured best on two cores sharing 32 MiB of L3; flat from 4 to 16."""
_GROUP_BYTES_GPU = 512 << 20
_QUERY_CHUNK = 256
"""Tokens of a chunk that are attended at once where a mask is needed; bounds the mask's size."""
_VECTOR_KEYS = 16
"""Scores in one of a CPU's widest vectors."""

_Kind = tuple[int | None, int]
"""The window and the KV group, which determine a plan."""


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode rows that read similar numbers of keys, neighbours in the sorted order."""

    start: int
    size: int
    block_ids: Tensor
    """[size × blocks of the longest row] int64."""
    most_keys: int
    mask: Tensor | None
    """[size, 1, 1, L], 0 or -inf, added to the scores; None where every row sees all that is read."""
    num_keys: Tensor
    """[size, 1] int64, the keys that are read for each row."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """The plan of the decode rows."""

    order: Tensor
    """[rows] int64, the rows, longest first."""
    rank: Tensor
    """[rows] int64, the inverse of `order`."""
    groups: list[_DecodeGroup]
    shared: list[SharedRead] | None
    """Segments read once for several rows; None: every row reads all of its keys on its own."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A prefill chunk: tokens [start, end) of those in chunks, after `prefix` tokens that were in the cache before."""

    start: int
    end: int
    prefix: int
    block_ids: Tensor | None
    """[blocks] int64; None without a prefix: the chunk's own k and v suffice."""
    first_key: int
    """Position of the first key in the first of the blocks."""
    is_shared: bool
    """Whether it shares a prefix, and is attended with others."""


class TorchBackend(AttentionBackend):
    """Attention in plain torch, on any device."""

    name = "torch"
    reads_new_keys = True  # those of prompts without a prefix
    reads_behind_rows = True
    reads_segments = True
    plans_on_device = True

    def __init__(self, case: AttentionCase) -> None:
        self._case = case
        if case.cache_dtype != case.dtype:
            # The cache rounds keys: they must be the same for every token that attends to them.
            self.reads_new_keys = False
        self._both_ways = any(spec.both_ways for spec in case.specs)
        self._kinds: list[_Kind] = list(dict.fromkeys((spec.window, spec.kv_group) for spec in case.specs))
        self._kv_heads_dim = max((spec.num_kv_heads * spec.head_dim for spec in case.specs), default=0)
        self._decodes: dict[_Kind, _Decodes] = {}
        self._chunks: dict[_Kind, list[_Chunk]] = {}
        self._prefix_reads: dict[_Kind, list[SharedRead]] = {}
        self._scratch = torch.empty(0)
        self._masks: dict[int | None, Tensor] = {}
        """The mask of each window (see `_reserve_mask`)."""

    @classmethod
    def unsupported(cls, case: AttentionCase) -> list[str]:
        return [
            f"{spec.num_heads} heads do not divide by {spec.num_kv_heads} KV heads"
            for spec in case.specs
            if spec.num_heads % spec.num_kv_heads
        ]

    def plan_decode_on_device(self, batch: ForwardBatch) -> None:
        lens = batch.seq_lens[: batch.num_decoded_rows].tolist()
        self._decodes = {kind: self._lay_out_decodes(kind, batch, lens) for kind in self._kinds}

    def plan_prefill_on_device(self, batch: ForwardBatch) -> None:
        lens = batch.seq_lens[batch.num_decoded_rows :].tolist()
        self._chunks = {kind: list(self._lay_out_chunks(kind, batch, lens)) for kind in self._kinds}
        counts, block_size = batch.num_tokens_host[batch.num_decoded_rows :].tolist(), self._case.block_size
        self._prefix_reads = {
            (window, group): plan_prefix_reads(batch, group, block_size, counts, lens)
            for window, group in self._kinds
            if batch.prefixes is not None and window is None
        }

    def decode(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        spec, number, sinks, bias = layer
        decodes = self._decodes[spec.window, spec.kv_group]
        k_cache, v_cache = batch.kv_cache.layer(number)
        scales = batch.kv_cache.scales(number)
        num_kv_heads, head_dim = k_cache.shape[2:]
        sorted_q = q.index_select(0, decodes.order).view(q.shape[0], num_kv_heads, -1, head_dim)
        is_part = decodes.shared is not None
        sorted_out = sorted_q.new_empty(  # [rows, KV, G, size of a value]
            *sorted_q.shape[:3], spec.result_dim, dtype=torch.float32 if is_part else None
        )
        log_sums = torch.empty(sorted_q.shape[:3] if is_part else (0,), device=q.device)
        assert bias is None or not is_part, "`select_backend` sees to it"
        sorted_bias = None if bias is None else bias.values.index_select(0, decodes.order)
        for group in decodes.groups:
            num_blocks = group.block_ids.shape[0]
            k, v = self._scratch[: 2 * num_blocks * k_cache[0].numel()].view(2, num_blocks, *k_cache.shape[1:])
            if not spec.has_values:
                gather_blocks(k_cache, None if scales is None else scales.k, group.block_ids, k)
                v = k[..., : spec.result_dim]
            elif self.reads_new_keys:
                v = v[..., : spec.result_dim]
                torch.index_select(k_cache, 0, group.block_ids, out=k)
                torch.index_select(v_cache, 0, group.block_ids, out=v)
            else:
                v = v[..., : spec.result_dim]
                gather_blocks(k_cache, None if scales is None else scales.k, group.block_ids, k)
                gather_blocks(v_cache, None if scales is None else scales.v, group.block_ids, v)
            rows = slice(group.start, group.start + group.size)
            keys, values = (
                part.flatten(0, 1).unflatten(0, (group.size, -1))[:, : group.most_keys].transpose(1, 2)
                for part in (k, v)
            )
            group_sinks = None if sinks is None else sinks.view(num_kv_heads, -1, 1)
            mask = group.mask
            if sorted_bias is not None:
                distances = group.num_keys - 1 - torch.arange(group.most_keys, device=q.device)
                near = bias_of_keys(sorted_bias[rows], distances)
                near = near.view(len(near), num_kv_heads, -1, group.most_keys)
                mask = near if mask is None else near + mask
            if is_part:
                sorted_out[rows], log_sums[rows] = written_softmax.attend_part(
                    spec, sorted_q[rows], keys, values, mask=group.mask, sinks=group_sinks
                )
            else:
                sorted_out[rows] = softmax_attention(
                    spec, sorted_q[rows], keys, values, mask=mask, is_causal=False, sinks=group_sinks
                )
        if decodes.shared is not None:
            whole, log_sums = sorted_out[decodes.rank], log_sums[decodes.rank]
            grouped_q = q.unflatten(1, (num_kv_heads, -1))  # type: ignore[no-untyped-call]
            for read in decodes.shared:
                keys, values = self._read_blocks(number, read.block_ids, batch.kv_cache)
                own = whole[read.rows], log_sums[read.rows]
                whole[read.rows], log_sums[read.rows] = written_softmax.join_parts(
                    own, read.attend(spec, grouped_q, keys, values)
                )
            return output_buffer(out, q, spec).copy_(whole.flatten(1, 2))
        return torch.index_select(sorted_out.flatten(1, 2), 0, decodes.rank, out=output_buffer(out, q, spec))

    def prefill(self, layer: AttentionLayer, q: Tensor, new: NewKV, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        assert (new is not None) == self.reads_new_keys
        spec, number, sinks, bias = layer
        out = output_buffer(out, q, spec)
        chunks = self._chunks[spec.window, spec.kv_group]
        for chunk in chunks:
            rows = slice(chunk.start, chunk.end)
            num_tokens = chunk.end - chunk.start
            if num_tokens == 0 or chunk.is_shared:  # a padding row, or attended below
                continue
            num_keys = chunk.prefix + num_tokens - chunk.first_key
            if chunk.block_ids is None:
                assert new is not None
                keys, values = (part[rows] for part in new)
            else:
                keys, values = (part[:num_keys] for part in self._read_blocks(number, chunk.block_ids, batch.kv_cache))
            if (spec.window is None or num_tokens <= spec.window) and (chunk.block_ids is None or spec.both_ways):
                near = None if bias is None else bias.values[rows]
                out[rows] = _attend(spec, q[rows], keys, values, mask=None, sinks=sinks, bias=near)
                continue
            reach = self._reach(spec.window)
            for start in range(0, num_tokens, _QUERY_CHUNK):
                end = min(start + _QUERY_CHUNK, num_tokens)
                own = chunk.prefix + start - chunk.first_key
                first = first_seen(chunk.prefix + start, spec.window) - chunk.first_key
                seen = slice(first, min(own + end - start + reach, num_keys))
                mask = self._mask(spec.window, end - start, own - first, seen.stop - first)
                queries = slice(chunk.start + start, chunk.start + end)
                near = None if bias is None else bias.values[queries]
                out[queries] = _attend(spec, q[queries], keys[seen], values[seen], mask=mask, sinks=sinks, bias=near)
        out[chunks[-1].end :].zero_()  # padding
        if reads := self._prefix_reads.get((spec.window, spec.kv_group)):
            self._attend_shared(layer, q, reads, batch.kv_cache, out)
        return out

    def _attend_shared(
        self, layer: AttentionLayer, q: Tensor, reads: list[SharedRead], kv_cache: KVCache, out: Tensor
    ) -> None:
        """Attend the chunks that share prefixes, and write their rows of `out`. A sink is a part without a value."""
        spec, number, sinks, bias = layer
        assert bias is None, "`select_backend` sees to it"
        grouped_q = q.unflatten(1, (spec.num_kv_heads, -1))  # type: ignore[no-untyped-call]
        whole = torch.zeros(*grouped_q.shape[:-1], spec.result_dim, device=q.device)
        log_sums = torch.full(grouped_q.shape[:-1], float("-inf"), device=q.device)
        if sinks is not None:
            log_sums.copy_(sinks.view(spec.num_kv_heads, -1).expand_as(log_sums))
        for read in reads:
            keys, values = self._read_blocks(number, read.block_ids, kv_cache)
            before = whole[read.rows], log_sums[read.rows]
            whole[read.rows], log_sums[read.rows] = written_softmax.join_parts(
                before, read.attend(spec, grouped_q, keys, values)
            )
        rows = torch.cat([read.rows for read in reads])
        out[rows] = whole[rows].flatten(1, 2).to(out.dtype)

    def _read_blocks(self, layer: int, block_ids: Tensor, kv_cache: KVCache) -> tuple[Tensor, Tensor]:
        return read_blocks(kv_cache, layer, block_ids, self._case.dtype)

    def _lay_out_decodes(self, kind: _Kind, batch: ForwardBatch, lens: list[int]) -> _Decodes:
        """Sort by the number of keys to read and cut into groups. A padding row without keys reads one key of the
        null block."""
        case, device = self._case, batch.seq_lens.device
        window, kv_group = kind
        # Keys before the first block that the row's token sees are `skipped`.
        skipped = [first_seen(length - 1, window) // case.block_size * case.block_size for length in lens]
        shared = None
        if batch.segments is not None:
            shared, own_begins = plan_shared_reads(batch, kv_group, window, case.block_size, lens)
            skipped = [max(skip, begin) for skip, begin in zip(skipped, own_begins, strict=True)]
        reads = [max(length, 1) - skip for length, skip in zip(lens, skipped, strict=True)]
        order = sorted(range(len(lens)), key=reads.__getitem__, reverse=True)
        order_t = torch.tensor(order, dtype=torch.int64, device=device)
        rank = torch.empty_like(order_t)
        rank[order_t] = torch.arange(len(lens), device=device)

        token_bytes = 2 * self._kv_heads_dim * case.dtype.itemsize
        group_tokens = (_GROUP_BYTES_CPU if device.type == "cpu" else _GROUP_BYTES_GPU) // token_bytes
        slots = batch.slots[: len(lens)].index_select(0, order_t).unsqueeze(1)
        tables = batch.block_tables[kv_group]
        first_blocks = torch.tensor([skipped[row] // case.block_size for row in order], device=device).unsqueeze(1)
        sorted_reads = torch.tensor([reads[row] for row in order], device=device).unsqueeze(1)
        num_blocks = (sorted_reads + case.block_size - 1) // case.block_size
        groups: list[_DecodeGroup] = []
        start = most_blocks = 0
        while start < len(lens):
            most_keys = reads[order[start]]
            width = ceil_div(most_keys, case.block_size)
            size = min(len(lens) - start, max(1, group_tokens // (width * case.block_size)))
            rows = slice(start, start + size)
            column = torch.arange(width, device=device)
            columns = (first_blocks[rows] + column).clamp_(max=tables.shape[1] - 1)
            block_ids = tables[slots[rows], columns].long()  # [size, width]
            block_ids = block_ids.masked_fill_(column >= num_blocks[rows], NULL_BLOCK).flatten()
            mask = None
            if reads[order[start + size - 1]] < most_keys or (window is not None and window < most_keys):
                key = torch.arange(most_keys, device=device)
                hidden = key >= sorted_reads[rows]
                if window is not None:
                    hidden |= key < sorted_reads[rows] - window
                mask = torch.zeros(size, most_keys, dtype=case.dtype, device=device)
                mask = mask.masked_fill_(hidden, float("-inf")).view(size, 1, 1, most_keys)
            groups.append(_DecodeGroup(start, size, block_ids, most_keys, mask, sorted_reads[rows]))
            most_blocks = max(most_blocks, size * width)
            start += size
        self._reserve_scratch(most_blocks, device)
        return _Decodes(order_t, rank, groups, shared)

    def _reserve_scratch(self, num_blocks: int, device: torch.device) -> None:
        numel = 2 * num_blocks * self._case.block_size * self._kv_heads_dim
        if self._scratch.numel() < numel or self._scratch.device != device:
            with torch.inference_mode(False):  # so that it may be written in either mode
                self._scratch = torch.empty(numel, dtype=self._case.dtype, device=device)

    def _lay_out_chunks(self, kind: _Kind, batch: ForwardBatch, lens: list[int]) -> Iterator[_Chunk]:
        case, first_row = self._case, batch.num_decoded_rows
        window, kv_group = kind
        counts = batch.num_tokens_host[first_row:].tolist()
        shares = [False] * len(lens)
        if batch.prefixes is not None and window is None:
            shares = (batch.prefixes.ends[first_row:] > 0).tolist()
        longest = 0
        for row, (num_tokens, seq_len, end) in enumerate(zip(counts, lens, accumulate(counts), strict=True), first_row):
            prefix = max(seq_len - num_tokens, 0)  # padding rows may have more tokens than keys
            block_ids, first_key = None, 0
            if prefix > 0 or not self.reads_new_keys:
                first_block = first_seen(prefix, window) // case.block_size
                columns = slice(first_block, ceil_div(max(seq_len, num_tokens), case.block_size))
                block_ids = batch.block_tables[kv_group, batch.slots[row], columns].long()
                first_key = first_block * case.block_size
            if block_ids is not None or (window is not None and window < num_tokens):
                longest = max(longest, seq_len, num_tokens)
            yield _Chunk(end - num_tokens, end, prefix, block_ids, first_key, shares[row - first_row])
        if longest:
            self._reserve_mask(window, longest, batch.seq_lens.device)

    def _reach(self, window: int | None) -> int:
        """Return how many keys after its own a token sees through a window."""
        return window - 1 if self._both_ways and window is not None else 0

    def _reserve_mask(self, window: int | None, longest: int, device: torch.device) -> None:
        """Keep a mask [_QUERY_CHUNK, W + _QUERY_CHUNK], W at least the keys that are seen after `longest` of them:
        row i sees the columns up to W + i, and with a window the last of those, or as many more behind it where tokens
        attend both ways. The mask of any queries is a part of it, so that none is built in the layers."""
        width = longest if window is None else min(longest, window + _QUERY_CHUNK)
        reach = self._reach(window)
        mask = self._masks.get(window)
        if mask is None or mask.shape[1] < width + _QUERY_CHUNK + reach or mask.device != device:
            with torch.inference_mode(False):
                own = width + torch.arange(_QUERY_CHUNK, device=device).unsqueeze(1)
                column = torch.arange(width + _QUERY_CHUNK + reach, device=device)
                hidden = column > own + reach
                if window is not None:
                    hidden |= column <= own - window
                mask = torch.zeros(hidden.shape, dtype=self._case.dtype, device=device)
                self._masks[window] = mask.masked_fill_(hidden, float("-inf"))

    def _mask(self, window: int | None, num_queries: int, own: int, num_seen: int) -> Tensor:
        """Cut out a mask [num_queries, num_seen]: the first query's own key is the one at `own`, and so on."""
        mask = self._masks[window]
        start = mask.shape[1] - _QUERY_CHUNK - self._reach(window) - own
        mask = mask[:num_queries, start : start + num_seen]
        # GPU kernels read masks from aligned addresses; `contiguous` would leave a single row where it is.
        return mask.clone(memory_format=torch.contiguous_format) if mask.is_cuda else mask


def read_blocks(kv_cache: KVCache, layer: int, block_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Copy the keys and values of blocks [n] out of the cache: [n × block_size, KV, D] each, in the run's type."""
    caches = kv_cache.layer(layer)
    if kv_cache.spec.stored_dtype == dtype:
        k, v = (cache.index_select(0, block_ids) for cache in caches)
    else:
        scales = kv_cache.scales(layer) or (None, None)
        k, v = (
            gather_blocks(cache, scale, block_ids, cache.new_empty(len(block_ids), *cache.shape[1:], dtype=dtype))
            for cache, scale in zip(caches, scales, strict=True)
        )
    return k.flatten(0, 1), v.flatten(0, 1)


def _attend(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Attend tokens of one request. q: [n, num_heads, D]; k, v: [m, KV, D]; sinks: [num_heads]; bias: [n, num_heads,
    distances] (`DistanceBias.values`) → [n, num_heads, D].

    Without a mask n equals m, and the attention is causal or both ways. KV heads take the batch dimension, and the
    query heads that share one the head dimension, where k and v are expanded without a copy.
    """
    group = q.shape[1] // k.shape[1]
    if bias is not None:
        # The last query's own key is the last one.
        own = len(k) - len(q) + torch.arange(len(q), device=q.device)
        near = bias_of_keys(bias, own.unsqueeze(1) - torch.arange(len(k), device=q.device))
        near = near.transpose(0, 1).reshape(-1, group, len(q), len(k))
        mask = near if mask is None else near + mask
    q = q.view(q.shape[0], -1, group, q.shape[-1]).permute(1, 2, 0, 3)  # [KV, G, n, D]
    k = k.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)  # [KV, G, m, D]
    v = v.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    if sinks is not None:
        sinks = sinks.view(-1, group, 1, 1)
    out = softmax_attention(spec, q, k, v, mask=mask, is_causal=mask is None and not spec.both_ways, sinks=sinks)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def softmax_attention(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, is_causal: bool, sinks: Tensor | None
) -> Tensor:
    """Compute softmax(q kᵀ scale, capped) v, over the last two dimensions. `mask` is added to the scores; sinks: see
    `written_softmax.attend`."""
    if written_softmax.is_needed(spec):
        return written_softmax.attend(spec, q, k, v, mask=mask, is_causal=is_causal, sinks=sinks)
    with _sound_kernels(q.device, k.shape[-2]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=spec.scale)


def _sound_kernels(device: torch.device, num_keys: int) -> AbstractContextManager[None]:
    """Rule out torch's kernels that are wrong: on a GPU cuDNN's, which faults on masks of odd widths (seen with torch
    2.11), and on a CPU the one that gives 0 for NaN where keys are few (up to 2.14)."""
    if device.type == "cuda":
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    elif num_keys < _VECTOR_KEYS:
        kernels = [SDPBackend.MATH]
    else:
        return nullcontext()
    return cast(AbstractContextManager[None], sdpa_kernel(kernels))
