"""Attention of each token to a choice of its keys (DeepSeek Sparse Attention, https://arxiv.org/abs/2512.02556): the
index keys by which they are chosen, the choice, and attention to what is chosen and, in some models, to a window. Plain
torch is the reference; CUDA tensors take the Triton kernels that are held to it.

Neighbouring keys may be chosen together, by pools of them, and the last ones, which fill no pool, in any case. A pool's
index key lies where its last token's keys are, behind that token's own: a mean that gates weigh, or the mean itself,
normed and rotated (Qwen4). Or a pool counts by the best of its keys, and each head has a choice of its own (MiniMax
Sparse Attention).

Shapes: T tokens, K most keys of a token, I index heads of E numbers, R rotated numbers, N heads, D numbers of a key,
V of a value, which are its key's first unless values are given apart, P keys of a pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.norm import rms_norm
from nvcli.kernels.pool_settings import SINGLE_KEYS, Pools
from nvcli.kernels.rotary import apply_rope
from nvcli.kernels.whole_numbers import ceil_div

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


class WindowKeys(NamedTuple):
    """The keys of the last tokens, to which a token attends besides those that are chosen."""

    cache: Tensor
    """[blocks, block_size, D]."""
    tokens: TokenKeys
    size: int
    """The most of them, the token's own included."""


class KeyWeights(NamedTuple):
    """The weights by which keys of windows of P tokens are made (`compressed_keys.py`)."""

    bias: Tensor
    """[P, numbers of a token] float32, added to the gates at each place in a window."""
    norm: Tensor
    """[D]."""
    eps: float


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
    gates: Tensor | None = None,
) -> None:
    """Rotate the first numbers of the first tokens' index queries in place, norm keys (LayerNorm), rotate these, and
    store them.

    queries: [first tokens, I, E], contiguous; keys: [T, E], rows may be strided; cos_sin: [T, R] float32, cosines then
    sines, or None: nothing is rotated; cache: [blocks, block_size, E or more]; slot_mapping: [T] int64, block id ×
    block_size + offset; weight, bias: [E]; gates: [T, E], rows as far apart as those of `keys`, which are stored behind
    them for `pool_keys`. Rotated numbers are left in the order of pairs (i, i + R/2), which scores do not depend on.
    """
    normed = rms_norm(keys.float(), weight, eps, is_centered=True, bias=bias).to(keys.dtype)
    if cos_sin is not None:
        queries.copy_(_rotate(queries, cos_sin[: len(queries)], is_interleaved))
        normed = _rotate(normed.unsqueeze(1), cos_sin, is_interleaved).squeeze(1)
    stored = normed if gates is None else torch.cat((normed, gates), dim=1)
    cache[slot_mapping // cache.shape[1], slot_mapping % cache.shape[1], : stored.shape[1]] = stored.to(cache.dtype)


@with_kernel("attention.pool_keys")
def pool_keys(cache: Tensor, tokens: TokenKeys, bias: Tensor) -> None:
    """Store the index keys of the pools that the tokens fill: means of P keys, weighed number by number by a softmax of
    their gates + bias.

    cache: [blocks, block_size, 3 E], a token's key and gates, which `store_index_keys` has stored, and the pool's key;
    bias: [P, E] float32, for each place in a pool.
    """
    size, block_size = bias.shape[1], cache.shape[1]
    tables, slots, seen = tokens.tables, tokens.slots, tokens.seen
    fills = (seen > 0) & (seen % len(bias) == 0)
    positions = seen[fills].long().unsqueeze(1) - torch.arange(len(bias), 0, -1, device=seen.device)
    blocks = tables[slots[fills].unsqueeze(1), positions // block_size].long()
    found = cache[blocks, positions % block_size].float()  # [pools, P, 3 E]
    shares = (found[..., size : 2 * size] + bias).softmax(dim=1).to(cache.dtype).float()
    pooled = (shares * found[..., :size]).sum(dim=1)
    cache[blocks[:, -1], positions[:, -1] % block_size, 2 * size :] = pooled.to(cache.dtype)


@with_kernel("attention.pool_keys")
def average_keys(cache: Tensor, tokens: TokenKeys, weight: Tensor, eps: float, pool: int) -> None:
    """Store the index keys of the pools that the tokens fill: means of P keys, normed, and rotated by the angles of a
    pool's first token.

    cache: [blocks, block_size, 2 E], a token's key and its angles, cosines then sines, whose place the key of the pool
    takes where the token is the last of one; weight: [E], that of the norm; pool: P, from 2 on.
    """
    size, block_size = len(weight), cache.shape[1]
    tables, slots, seen = tokens.tables, tokens.slots, tokens.seen
    fills = (seen > 0) & (seen % pool == 0)
    positions = seen[fills].long().unsqueeze(1) - torch.arange(pool, 0, -1, device=seen.device)
    blocks = tables[slots[fills].unsqueeze(1), positions // block_size].long()
    found = cache[blocks, positions % block_size].float()  # [pools, P, 2 E]
    means = found[..., :size].mean(dim=1).to(cache.dtype)
    keys = apply_rope(rms_norm(means, weight, eps).unsqueeze(1), found[:, 0, size:]).squeeze(1)
    cache[blocks[:, -1], positions[:, -1] % block_size, size:] = keys.to(cache.dtype)


@with_kernel("attention.pool_keys")
def expand_pools(chosen_pools: Tensor, tokens: TokenKeys, chosen: Tensor, pools: Pools) -> None:
    """Write the positions of each token's chosen keys to `chosen` [T, K] int32: those of its chosen pools, and the keys
    after the last pool that it could choose. The rest of a row is undefined. chosen_pools: [T, most pools] int32, as
    `choose_keys` writes them."""
    places, size, most = torch.arange(chosen.shape[1], device=chosen.device), pools.size, chosen_pools.shape[1]
    whole = num_pools(tokens.seen, pools).unsqueeze(1)
    in_pools = whole.clamp(max=most) * size
    first = chosen_pools.gather(1, (places // size).clamp(max=most - 1).expand(len(chosen), -1))
    in_order = torch.where(places < in_pools, first * size + places % size, whole * size + places - in_pools)
    chosen.copy_(in_order)


def num_pools(seen: Tensor, pools: Pools) -> Tensor:
    """Return how many pools tokens choose from that see so many keys."""
    return (seen - pools.num_last).clamp(min=0) // pools.size


def _rotate(x: Tensor, cos_sin: Tensor, is_interleaved: bool) -> Tensor:
    size = cos_sin.shape[1]
    turned = x[..., :size]
    if is_interleaved:
        turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)
    return torch.cat((apply_rope(turned, cos_sin), x[..., size:]), dim=-1)


@with_kernel("attention.choose_keys")
def choose_keys(
    queries: Tensor,
    weights: Tensor | None,
    cache: Tensor,
    tokens: TokenKeys,
    chosen: Tensor,
    scores: Tensor,
    pools: Pools = SINGLE_KEYS,
) -> None:
    """Write the positions of each token's keys with the highest scores, ascending, to `chosen` [T, K] int32; all that
    it sees, if these are no more than K. The rest of a row is undefined. Of equal scores the first ones count. With
    `pools`, these are the numbers of pools that a token may choose.

    A key's score is Σ weight × max(0, query · key) over heads. The score of a pool is that of the index key in the
    place of its last key; without weights there is one head, and it is the highest query · key of the pool's keys.

    queries: [T, I, E], contiguous; weights: [T, I] float32; cache: [blocks, block_size, E]; scores: [some tokens, most
    keys] float32, scratch memory, which the reference does not need.
    """
    for first, end, keys in _runs(cache, tokens, pools, by_best=weights is None):
        seen = num_pools(tokens.seen[first:end].unsqueeze(1), pools)
        products = torch.einsum("tie,le->til", queries[first:end].float(), keys.float())
        if weights is None:
            found = products.view(end - first, -1, pools.size).amax(dim=2)
        else:
            found = torch.einsum("til,ti->tl", products.relu_(), weights[first:end])
        hidden = torch.arange(found.shape[1], device=keys.device) >= seen
        best = found.masked_fill_(hidden, float("-inf")).argsort(dim=1, descending=True, stable=True)
        best = best[:, : chosen.shape[1]].sort(dim=1).values
        chosen[first:end, : best.shape[1]] = best


@with_kernel("attention.attend_chosen")
def attend_chosen(
    queries: Tensor,
    cache: Tensor,
    tokens: TokenKeys,
    chosen: Tensor | None,
    out: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
    values: Tensor | None = None,
    window: WindowKeys | None = None,
) -> None:
    """Attend to the first `tokens.seen` of the chosen keys, or to all, and to the keys of a window. queries: [T, N, D],
    contiguous; cache: [blocks, block_size, D]; chosen: [T, K] int32, or None: all keys in order; out: [T, N, V],
    contiguous, written; zeros for padding; sinks: [N] float32, a score of each head that belongs to no key and is not
    scaled; values: [blocks, block_size, V], as far apart as the keys and without a window, or None: they are the first
    numbers of their keys."""
    out.zero_()
    for first in range(0, len(queries), _TOKENS):
        part = slice(first, first + _TOKENS)
        counts = tokens.seen[part].unsqueeze(1)
        if chosen is None:
            places = torch.arange(int(counts.max()), device=cache.device).expand(len(counts), -1)
        else:
            counts = counts.clamp(max=chosen.shape[1])
            places = chosen[part, : int(counts.max())].long()
        found, is_key = _gather(cache, tokens, part, places, counts)
        found_values = found if values is None else _gather(values, tokens, part, places, counts)[0]
        if window is not None:
            seen = window.tokens.seen[part].unsqueeze(1)
            counts = seen.clamp(max=window.size)
            near = seen - counts + torch.arange(int(counts.max()), device=cache.device)
            of_window, is_near = _gather(window.cache, window.tokens, part, near, counts)
            found_values = found = torch.cat((of_window, found), dim=1)
            is_key = torch.cat((is_near, is_key), dim=1)
        scores = torch.einsum("tnd,tkd->tnk", queries[part].float(), found).mul_(scale)
        scores.masked_fill_(~is_key.unsqueeze(1), float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(1, -1, 1).expand(len(scores), -1, 1)), dim=-1)
        shares = scores.softmax(dim=-1)[..., : found.shape[1]]
        result = torch.einsum("tnk,tkv->tnv", shares, found_values[..., : out.shape[2]]).to(out.dtype)
        out[part] = result.masked_fill(~is_key.any(dim=1).view(-1, 1, 1), 0)


def _gather(cache: Tensor, tokens: TokenKeys, part: slice, places: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Read the keys of some tokens, of whose `places` [tokens, K] the first `counts` [tokens, 1] count. Returns
    [tokens, K, D] float32, and which of them count."""
    is_key = torch.arange(places.shape[1], device=places.device) < counts
    places = places.masked_fill(~is_key, 0)
    blocks = tokens.tables[tokens.slots[part].unsqueeze(1), places // cache.shape[1]].long()
    return cache[blocks, places % cache.shape[1]].float(), is_key


def split_rows(rows: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Return views of the keys and values that stand side by side for each token: [blocks, block_size, 2 × heads × D] →
    twice [blocks, block_size, heads, D]."""
    keys, values = rows.view(*rows.shape[:2], 2, num_heads, -1).unbind(2)
    return keys, values


def _runs(cache: Tensor, tokens: TokenKeys, pools: Pools, *, by_best: bool) -> Iterator[tuple[int, int, Tensor]]:
    """Yield runs of tokens of a request, [first, end), with what lies in the last place of each pool of keys that the
    last of them sees, or in all places of pools that count by their best key; none where it sees no whole one."""
    seen, slots = tokens.seen.tolist(), tokens.slots.tolist()
    first = 0
    while first < len(seen):
        end = first + 1
        while (
            end < len(seen) and end < first + _TOKENS and (slots[end], seen[end]) == (slots[first], seen[end - 1] + 1)
        ):
            end += 1
        if length := seen[end - 1] // pools.size * pools.size:
            blocks = tokens.tables[slots[first], : ceil_div(length, cache.shape[1])].long()
            keys = cache[blocks].flatten(0, 1)[:length]
            yield first, end, keys if by_best else keys[pools.size - 1 :: pools.size]
        first = end
