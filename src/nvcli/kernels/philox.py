"""Philox4x32-10, a counter-based random number generator (Salmon et al., SC 2011; the constants are the paper's).

A number is a pure function of key and counter. Sampling uses key = the request's seed and counter =
(token id // 4, position, row, sample): the noise that a token id meets at a position depends on nothing else, not on
the batch, the slot, or what was sampled before. Token id t takes output word t % 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.whole_numbers import ceil_div

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def _mul_high_low(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Compute the high and low 32 bits of x × multiplier; x holds 32-bit values in int64."""
    # The 64-bit product would overflow the sign: multiply by halves.
    low_part = (x & 0xFFFF) * multiplier
    high_part = (x >> 16) * multiplier + (low_part >> 16)
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)


def philox(key: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make four words of 32 bits, as int64. `key`: int64; `counter`: int64 with values below 2^32; shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _mul_high_low(c0, _M0)
        high1, low1 = _mul_high_low(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(words: Tensor) -> Tensor:
    """Turn 32-bit words into float32 in [2^-24, 1 - 2^-24], exactly: the top 23 bits and a half."""
    return (words >> 9).to(torch.float32) * 2.0**-23 + 2.0**-24


def token_uniforms(
    seeds: Tensor, positions: Tensor, rows: Tensor, samples: Tensor, vocab_size: int, *, start: int = 0
) -> Tensor:
    """Make one number for each of `vocab_size` token ids from `start` on: [N] int64 each → [N, vocab_size] float32."""
    first = start // 4
    blocks = torch.arange(first, ceil_div(start + vocab_size, 4), device=seeds.device)
    skipped = start - 4 * first
    counter = (blocks[None, :], positions[:, None], (rows & _MASK)[:, None], samples[:, None])
    words = torch.stack(philox(seeds[:, None], counter), dim=-1)
    return uniform(words.reshape(len(seeds), -1)[:, skipped : skipped + vocab_size])


def uniforms_at(seeds: Tensor, positions: Tensor, rows: Tensor, samples: Tensor, tokens: Tensor) -> Tensor:
    """Make the numbers of `token_uniforms` for tokens in any order: `tokens` [N, T] int64, the others [N] int64 → [N,
    T] float32."""
    counter = (tokens // 4, positions[:, None], (rows & _MASK)[:, None], samples[:, None])
    words = torch.stack(philox(seeds[:, None], counter), dim=-1)
    return uniform(words.gather(-1, (tokens % 4)[..., None])[..., 0])
