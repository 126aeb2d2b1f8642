"""The `torch` backend: paged attention in plain torch on any device. It defines what the others must compute.

Speed matters on the CPU, where it is the backend of choice. Decode rows are sorted by length and cut into groups of
similar length, small enough that a group's keys and values stay in the processor's cache between being gathered from
their blocks and being read by `scaled_dot_product_attention`. The query heads that share a KV head stand in the
query-length dimension, so that keys and values are never repeated. All of it is laid out once a step, in `plan`, from
lengths read off the device.

Shapes: T tokens, D head_dim, KV heads of this rank, G = num_heads / KV query heads for each, L longest of a group.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nvcli.attention.backend import AttentionBackend, AttentionCase, AttentionSpec, new_or
from nvcli.attention.forward_batch import ForwardBatch

_GROUP_BYTES_CPU = 4 << 20
"""Gathered keys and values of one group: measured best on two cores sharing 32 MiB of L3; flat from 4 to 16."""
_GROUP_BYTES_GPU = 512 << 20
_QUERY_CHUNK = 256
"""Rows of a prompt slice behind a cached prefix that are attended at once; bounds the mask's size."""


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode rows of similar length, neighbours in the sorted order."""

    start: int
    size: int
    block_ids: Tensor
    """[size × blocks of the longest] int64."""
    max_len: int
    mask: Tensor | None
    """[size, 1, 1, L], 0 or -inf, added to the scores; None where all lengths are equal."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """A prompt slice: tokens [start, end) of those in slices, behind `prefix` tokens that were in the cache before."""

    start: int
    end: int
    prefix: int
    block_ids: Tensor | None
    """[blocks] int64; None without a prefix: the slice's own k and v are all it needs."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    order: Tensor
    """[decodes] int64: rows, longest first."""
    rank: Tensor
    """[decodes] int64: its inverse."""
    groups: list[_DecodeGroup]


class TorchBackend(AttentionBackend):
    name = "torch"

    def __init__(self, case: AttentionCase) -> None:
        self._case = case
        self._decodes: _Decodes | None = None
        self._slices: list[_Slice] = []
        self._scratch = torch.empty(0)
        self._causal_mask = torch.empty(0, 0)

    @classmethod
    def unsupported(cls, case: AttentionCase) -> list[str]:
        if case.num_heads % case.num_kv_heads:
            return [f"{case.num_heads} heads do not divide by {case.num_kv_heads} KV heads"]
        return []

    def plan_decode(self, batch: ForwardBatch) -> None:
        self._decodes = self._lay_out_decodes(batch, batch.seq_lens[: batch.num_decodes].tolist())

    def plan_extend(self, batch: ForwardBatch) -> None:
        self._slices = self._lay_out_slices(batch, batch.seq_lens[batch.num_decodes :].tolist())

    def decode(self, spec: AttentionSpec, layer: int, q: Tensor, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        assert self._decodes is not None, "plan comes before forward"
        k_cache, v_cache = batch.kv_cache.layer(layer)
        num_kv_heads, head_dim = k_cache.shape[2:]
        sorted_q = q.index_select(0, self._decodes.order).view(q.shape[0], num_kv_heads, -1, head_dim)
        sorted_out = torch.empty_like(sorted_q)  # [decodes, KV, G, D], longest first
        for group in self._decodes.groups:
            num_blocks = group.block_ids.shape[0]
            k, v = self._scratch[: 2 * num_blocks * k_cache[0].numel()].view(2, num_blocks, *k_cache.shape[1:])
            torch.index_select(k_cache, 0, group.block_ids, out=k)
            torch.index_select(v_cache, 0, group.block_ids, out=v)
            shape = (group.size, -1, num_kv_heads, head_dim)
            rows = slice(group.start, group.start + group.size)
            with _sound_kernels(q.device):
                sorted_out[rows] = F.scaled_dot_product_attention(
                    sorted_q[rows],
                    k.view(shape)[:, : group.max_len].transpose(1, 2),
                    v.view(shape)[:, : group.max_len].transpose(1, 2),
                    attn_mask=group.mask,
                    scale=spec.scale,
                )
        return torch.index_select(sorted_out.flatten(1, 2), 0, self._decodes.rank, out=new_or(out, q))

    def extend(
        self, spec: AttentionSpec, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, out: Tensor | None
    ) -> Tensor:
        k_cache, v_cache = batch.kv_cache.layer(layer)
        out = new_or(out, q)
        for piece in self._slices:
            rows = slice(piece.start, piece.end)
            if piece.block_ids is None:
                out[rows] = _attend(spec, q[rows], k[rows], v[rows], mask=None)
                continue
            length = piece.prefix + piece.end - piece.start
            past_k = k_cache.index_select(0, piece.block_ids).flatten(0, 1)[:length]
            past_v = v_cache.index_select(0, piece.block_ids).flatten(0, 1)[:length]
            for start in range(piece.start, piece.end, _QUERY_CHUNK):
                end = min(start + _QUERY_CHUNK, piece.end)
                visible = piece.prefix + end - piece.start
                mask = self._chunk_mask(end - start, visible)
                out[start:end] = _attend(spec, q[start:end], past_k[:visible], past_v[:visible], mask=mask)
        return out

    def _lay_out_decodes(self, batch: ForwardBatch, lens: list[int]) -> _Decodes:
        """Sort by length and cut into groups. Padding rows of length 0 read one token of the null block."""
        case, device = self._case, batch.seq_lens.device
        order = sorted(range(len(lens)), key=lens.__getitem__, reverse=True)
        order_t = torch.tensor(order, dtype=torch.int64, device=device)
        rank = torch.empty_like(order_t)
        rank[order_t] = torch.arange(len(lens), device=device)

        token_bytes = 2 * case.num_kv_heads * case.head_dim * case.dtype.itemsize
        group_tokens = (_GROUP_BYTES_CPU if device.type == "cpu" else _GROUP_BYTES_GPU) // token_bytes
        sorted_lens = batch.seq_lens[: len(lens)].index_select(0, order_t).clamp_(min=1)
        groups: list[_DecodeGroup] = []
        start = most_blocks = 0
        while start < len(lens):
            max_len = max(lens[order[start]], 1)
            num_blocks = -(-max_len // case.block_size)
            size = min(len(lens) - start, max(1, group_tokens // (num_blocks * case.block_size)))
            rows = slice(start, start + size)
            block_ids = batch.block_tables[:, :num_blocks].index_select(0, order_t[rows]).flatten().long()
            mask = None
            if lens[order[start + size - 1]] < max_len:
                hidden = torch.arange(max_len, device=device) >= sorted_lens[rows].unsqueeze(1)
                mask = torch.zeros(size, max_len, dtype=case.dtype, device=device)
                mask = mask.masked_fill_(hidden, float("-inf")).view(size, 1, 1, max_len)
            groups.append(_DecodeGroup(start, size, block_ids, max_len, mask))
            most_blocks = max(most_blocks, size * num_blocks)
            start += size
        self._reserve_scratch(most_blocks, device)
        return _Decodes(order_t, rank, groups)

    def _reserve_scratch(self, num_blocks: int, device: torch.device) -> None:
        case = self._case
        numel = 2 * num_blocks * case.block_size * case.num_kv_heads * case.head_dim
        if self._scratch.numel() < numel or self._scratch.device != device:
            with torch.inference_mode(False):  # so that it may be written in either mode
                self._scratch = torch.empty(numel, dtype=case.dtype, device=device)

    def _lay_out_slices(self, batch: ForwardBatch, lens: list[int]) -> list[_Slice]:
        case = self._case
        ends = list(accumulate(batch.extend_lens, initial=0))
        slices, longest = [], 0
        for i, (extend_len, seq_len) in enumerate(zip(batch.extend_lens, lens, strict=True)):
            prefix = seq_len - extend_len
            block_ids = None
            if prefix > 0:
                longest = max(longest, seq_len)
                num_blocks = -(-seq_len // case.block_size)
                block_ids = batch.block_tables[batch.num_decodes + i, :num_blocks].long()
            slices.append(_Slice(ends[i], ends[i + 1], prefix, block_ids))
        if longest:
            self._reserve_causal_mask(longest, batch.seq_lens.device)
        return slices

    def _reserve_causal_mask(self, longest: int, device: torch.device) -> None:
        """[_QUERY_CHUNK, W + _QUERY_CHUNK], W at least `longest`: row i sees the columns up to W + i. The mask of any
        chunk is a window of it, so that none is built in the layers."""
        width = longest + _QUERY_CHUNK
        if self._causal_mask.shape[1] < width or self._causal_mask.device != device:
            with torch.inference_mode(False):
                mask = torch.full((_QUERY_CHUNK, width), float("-inf"), dtype=self._case.dtype, device=device)
                self._causal_mask = mask.triu_(diagonal=longest + 1)

    def _chunk_mask(self, num_queries: int, num_visible: int) -> Tensor:
        """[num_queries, num_visible]: the last query sees all, each one before it one token less."""
        end = self._causal_mask.shape[1] - _QUERY_CHUNK + num_queries
        mask = self._causal_mask[:num_queries, end - num_visible : end]
        return mask.contiguous() if mask.is_cuda else mask  # GPU kernels read masks from aligned addresses


def _attend(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None) -> Tensor:
    """One request's slice. q: [n, num_heads, D]; k, v: [m, KV, D] → [n, num_heads, D].

    Without a mask n equals m and the attention is causal. KV heads take the batch dimension, and the query heads that
    share one the head dimension, where k and v are expanded without a copy.
    """
    group = q.shape[1] // k.shape[1]
    q = q.view(q.shape[0], -1, group, q.shape[-1]).permute(1, 2, 0, 3)  # [KV, G, n, D]
    k = k.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)  # [KV, G, m, D]
    v = v.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    with _sound_kernels(q.device):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=spec.scale)
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def _sound_kernels(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU, all of torch's attention but cuDNN's, which faults on masks of odd widths (seen with torch 2.11)."""
    if device.type != "cuda":
        return nullcontext()
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return cast(AbstractContextManager[None], sdpa_kernel(kernels))
