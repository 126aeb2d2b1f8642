"""From the projections of latent attention to its keys: the norm of latent vectors, rotary positions, and the store
into the cache. Plain torch is the reference; CUDA tensors take the Triton kernel that is held to it.

Shapes: T tokens, N heads, P plain and R rotated numbers of a query, L size of a latent vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.fp8_kv import store_heads
from nvcli.kernels.latent_types import LatentHeads
from nvcli.kernels.norm import rms_norm
from nvcli.kernels.rotary import apply_rope


def rotate_and_store(
    queries: Tensor,
    latents: Tensor,
    cos_sin: Tensor | None,
    absorbed: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    slot_mapping: Tensor,
    heads: LatentHeads,
    *,
    weight: Tensor,
    eps: float,
    keep_keys: bool,
) -> Tensor | None:
    """Rotate the last numbers of the first tokens' queries into `absorbed`, and those of the others where they stand;
    norm the latent vectors, rotate the keys, and store both.

    queries: [T, N, P + R]; latents: [T, L + R], rows may be strided; cos_sin: [T, R] float32, cosines then sines of the
    R/2 angles, or None, where nothing is rotated; absorbed: [first tokens, N, L + R], contiguous, of which the last R
    of each head are written; cache: [num_blocks, block_size, 1, L + R], contiguous within each block; scales: those of
    an FP8 cache (`fp8_kv.KVScales`), else None; slot_mapping: [T] int64, block id × block_size + offset; weight: [L].
    Rotated numbers are left in the order of pairs (i, i + R/2), which scores do not depend on.

    Returns what was stored, [T, 1, L + R], or None without `keep_keys`.
    """
    if queries.is_cuda:
        from nvcli.kernels.triton.elementwise import latents as kernels

        kernels.rotate_and_store(
            queries, latents, cos_sin, absorbed, cache, slot_mapping, heads, weight=weight, eps=eps
        )
        return stored_keys(cache, slot_mapping) if keep_keys else None
    rotate_queries(queries, cos_sin, absorbed, heads)
    normed = rms_norm(latents[:, : heads.latent_dim], weight, eps)
    turned = _rotate(latents[:, None, heads.latent_dim :], cos_sin, heads)
    keys = torch.cat((normed.unsqueeze(1), turned), dim=-1)
    if scales is not None:
        store_heads(cache, scales, slot_mapping, keys)
    else:
        cache[slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]] = keys
    return keys if keep_keys else None


def rotate_queries(queries: Tensor, cos_sin: Tensor | None, absorbed: Tensor, heads: LatentHeads) -> None:
    """Rotate queries as `rotate_and_store` does, whose arguments these are. It has no kernel, as layers that store no
    keys are few, and those of published models rotate nothing."""
    rotated = _rotate(queries[..., heads.plain_dim :], cos_sin, heads)
    absorbed[..., heads.latent_dim :] = rotated[: len(absorbed)]
    queries[len(absorbed) :, :, heads.plain_dim :] = rotated[len(absorbed) :]


def _rotate(x: Tensor, cos_sin: Tensor | None, heads: LatentHeads) -> Tensor:
    if cos_sin is None:
        return x
    if heads.is_interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return apply_rope(x, cos_sin)


def stored_keys(cache: Tensor, slot_mapping: Tensor) -> Tensor:
    """Return the keys of some tokens, [T, 1, L + R], as the cache has them."""
    block_size = cache.shape[1]
    return cache[slot_mapping // block_size, slot_mapping % block_size]
