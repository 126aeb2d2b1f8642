"""Keys that stand for several tokens each (compressed attention of DeepSeek-V4, 2026). Plain torch is the reference;
CUDA tensors take the Triton kernels that are held to it.

A key is a mean of the tokens of its window, weighed number by number by a softmax of their gates, then normed and
rotated by the position of its window's first token. Windows follow each other, P tokens each. With two series of
values a key is also made of the window before: the first series counts for the next window's key, and the second one
for that of the token's own.

Shapes: T tokens, D numbers of a key, of which the last R are rotated, S series (1 or 2), W = S × D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.chosen_keys import KeyWeights, TokenKeys
from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.norm import rms_norm
from nvcli.kernels.shared_keys import rotate_tail


@with_kernel("attention.compressed_keys")
def store_inputs(rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Store numbers of tokens: index keys, or what keys are made of. rows: [T, M]; cache: [blocks, block_size, M];
    slot_mapping: [T] int64, block id × block_size + offset."""
    cache[slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]] = rows.to(cache.dtype)


@with_kernel("attention.compressed_keys")
def compress_keys(
    inputs: Tensor,
    tokens: TokenKeys,
    keys: Tensor,
    tables: Tensor,
    angles: Tensor,
    weights: KeyWeights,
) -> None:
    """Store the keys of the windows that the tokens fill.

    inputs: [blocks, block_size, 2 W], values and behind them gates, which `store_inputs` has stored where `tokens` says
    that the tokens seen are; keys: [blocks, keys of a block, D]; tables: [slots, blocks] int32, where they are; angles:
    [positions, R] float32, cosines then sines. Rotated numbers are left in the order of pairs (i, i + R/2) of
    neighbouring ones.
    """
    rate, width = weights.bias.shape
    size, block_size = keys.shape[2], inputs.shape[1]
    num_series = width // size
    fills = (tokens.seen > 0) & (tokens.seen % rate == 0)
    seen, slots = tokens.seen[fills].long(), tokens.slots[fills]
    positions = seen.unsqueeze(1) - torch.arange(num_series * rate, 0, -1, device=seen.device)  # [keys, S P]
    is_token = (positions >= 0).view(-1, num_series, rate, 1)
    blocks = tokens.tables[slots.unsqueeze(1), positions.clamp(min=0) // block_size].long()
    found = inputs[blocks, positions % block_size].float()
    values, gates = found.view(-1, num_series, rate, 2 * width).chunk(2, dim=3)
    gates = (gates + weights.bias).masked_fill(~is_token, float("-inf"))
    # Of each window the series that counts for the key: [keys, S, P, W] → [keys, S P, D].
    values, gates = (
        torch.cat([of[:, one, :, one * size : (one + 1) * size] for one in range(num_series)], dim=1)
        for of in (values, gates)
    )
    means = (values * gates.softmax(dim=1)).sum(dim=1)
    normed = rms_norm(means, weights.norm.float(), weights.eps).unsqueeze(1)
    numbers = seen // rate - 1
    result = rotate_tail(normed, angles[numbers * rate]).squeeze(1)
    found_keys = tables[slots, numbers // keys.shape[1]].long()
    keys[found_keys, numbers % keys.shape[1]] = result.to(keys.dtype)
