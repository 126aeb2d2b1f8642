"""Attention of each token to a choice of its keys (DeepSeek Sparse Attention, https://arxiv.org/abs/2512.02556): the
index keys by which they are chosen, the choice, and latent attention to what is chosen. Plain torch is the reference;
CUDA tensors take the Triton kernels that are held to it.

Shapes: T tokens, K most keys of a token, I index heads of E numbers, R rotated numbers, N heads, D numbers of a key,
V of a value, which are its key's first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.norm import rms_norm
from nvcli.kernels.rotary import apply_rope

_TOKENS = 128
"""Tokens whose scores are computed at a time; bounds their memory."""


class TokenKeys(NamedTuple):
    """The places of the keys of a batch's tokens."""

    seen: Tensor
    """[T] int32, the keys that each token sees, its own included; 0 for padding."""
    slots: Tensor
    """[T] int64, the rows of `tables` in which their blocks are."""
    tables: Tensor
    """[slots, blocks] int32."""


@with_kernel("attention.token_rows")
def expand_rows(starts: Tensor, seq_lens: Tensor, slots: Tensor, token_lens: Tensor, token_slots: Tensor) -> None:
    """Write the keys that each token of some rows sees, its own included, and its slot. Those of other tokens are left.

    starts: [B + 1] int32, the first token of each row; seq_lens: [B] int32, its keys; slots: [B] int64; token_lens: [T]
    int32; token_slots: [T] int64.
    """
    counts = starts.diff().long()
    row = torch.repeat_interleave(torch.arange(len(slots), device=slots.device), counts)
    token = starts[0] + torch.arange(len(row), dtype=starts.dtype, device=starts.device)
    token_lens[token] = (seq_lens[row] - (starts[row + 1] - 1 - token)).clamp_(min=0)
    token_slots[token] = slots[row]


@with_kernel("elementwise.index_keys")
def store_index_keys(
    queries: Tensor,
    keys: Tensor,
    cos_sin: Tensor | None,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    is_interleaved: bool,
) -> None:
    """Rotate the first numbers of the first tokens' index queries in place, norm keys (LayerNorm), rotate these, and
    store them.

    queries: [first tokens, I, E], contiguous; keys: [T, E], rows may be strided; cos_sin: [T, R] float32, cosines then
    sines, or None: nothing is rotated; cache: [blocks, block_size, E]; slot_mapping: [T] int64, block id × block_size +
    offset; weight, bias: [E]. Rotated numbers are left in the order of pairs (i, i + R/2), which scores do not depend
    on.
    """
    normed = rms_norm(keys.float(), weight, eps, is_centered=True, bias=bias).to(keys.dtype)
    if cos_sin is not None:
        queries.copy_(_rotate(queries, cos_sin[: len(queries)], is_interleaved))
        normed = _rotate(normed.unsqueeze(1), cos_sin, is_interleaved).squeeze(1)
    cache[slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]] = normed.to(cache.dtype)


def _rotate(x: Tensor, cos_sin: Tensor, is_interleaved: bool) -> Tensor:
    size = cos_sin.shape[1]
    turned = x[..., :size]
    if is_interleaved:
        turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)
    return torch.cat((apply_rope(turned, cos_sin), x[..., size:]), dim=-1)


@with_kernel("attention.choose_keys")
def choose_keys(
    queries: Tensor, weights: Tensor, cache: Tensor, tokens: TokenKeys, chosen: Tensor, scores: Tensor
) -> None:
    """Write the positions of each token's keys with the highest scores, ascending, to `chosen` [T, K] int32; all that
    it sees, if these are no more than K. The rest of a row is undefined. Of equal scores the first ones count.

    A key's score is Σ weight × max(0, query · key) over heads. queries: [T, I, E], contiguous; weights: [T, I] float32;
    cache: [blocks, block_size, E]; scores: [some tokens, most keys] float32, scratch memory, which the reference does
    not need.
    """
    for first, end, keys in _runs(cache, tokens):
        seen = tokens.seen[first:end].unsqueeze(1)
        products = torch.einsum("tie,le->til", queries[first:end].float(), keys.float()).relu_()
        found = torch.einsum("til,ti->tl", products, weights[first:end])
        hidden = torch.arange(len(keys), device=keys.device) >= seen
        best = found.masked_fill_(hidden, float("-inf")).argsort(dim=1, descending=True, stable=True)
        best = best[:, : chosen.shape[1]].sort(dim=1).values
        chosen[first:end, : best.shape[1]] = best


@with_kernel("attention.attend_chosen")
def attend_chosen(
    queries: Tensor,
    cache: Tensor,
    tokens: TokenKeys,
    chosen: Tensor,
    out: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> None:
    """Attend to the chosen keys. queries: [T, N, D], contiguous; cache: [blocks, block_size, D]; chosen: [T, K] int32;
    out: [T, N, V], contiguous, written; zeros for padding; sinks: [N] float32, a score of each head that belongs to no
    key and is not scaled."""
    out.zero_()
    for first, end, keys in _runs(cache, tokens):
        num_chosen = min(len(keys), chosen.shape[1])
        counts = tokens.seen[first:end].clamp(max=num_chosen).unsqueeze(1)
        is_chosen = torch.arange(num_chosen, device=keys.device) < counts
        places = chosen[first:end, :num_chosen].long().masked_fill(~is_chosen, 0)
        found = keys[places].float()  # [tokens, chosen, D]
        scores = torch.einsum("tnd,tkd->tnk", queries[first:end].float(), found).mul_(scale)
        scores.masked_fill_(~is_chosen.unsqueeze(1), float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(1, -1, 1).expand(len(scores), -1, 1)), dim=-1)
        shares = scores.softmax(dim=-1)[..., :num_chosen]
        out[first:end] = torch.einsum("tnk,tkv->tnv", shares, found[..., : out.shape[2]]).to(out.dtype)


def _runs(cache: Tensor, tokens: TokenKeys) -> Iterator[tuple[int, int, Tensor]]:
    """Yield runs of tokens of a request, [first, end), with the keys [L, …] that the last of them sees."""
    seen, slots = tokens.seen.tolist(), tokens.slots.tolist()
    first = 0
    while first < len(seen):
        end = first + 1
        while (
            end < len(seen) and end < first + _TOKENS and (slots[end], seen[end]) == (slots[first], seen[end - 1] + 1)
        ):
            end += 1
        if (length := seen[end - 1]) > 0:
            blocks = tokens.tables[slots[first], : -(-length // cache.shape[1])].long()
            yield first, end, cache[blocks].flatten(0, 1)[:length]
        first = end
