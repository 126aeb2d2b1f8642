"""Attention whose heads share one key for each token, which is its value, too: the norms and rotary positions of
queries and keys, the store into the cache, and the rotation of results back. Plain torch is the reference; CUDA tensors
take the Triton kernels that are held to it.

Neighbouring numbers at the end of a head are turned as pairs, and lie in the order of pairs (i, i + R/2) between
`norm_rotate_store` and `turn_back`, which scores do not depend on.

Shapes: T tokens, N heads, D numbers of a head, of which the last R are rotated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.fp8_kv import store_heads
from nvcli.kernels.norm import rms_norm
from nvcli.kernels.rotary import apply_rope


def rotate_tail(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the last numbers of heads as pairs of neighbours, and leave them in the order of pairs (i, i + R/2).

    x: [T, heads, D]; cos_sin: [T, R] float32, cosines then sines of the R/2 angles → [T, heads, D].
    """
    plain, tail = x.tensor_split([x.shape[-1] - cos_sin.shape[1]], dim=-1)
    return torch.cat((plain, apply_rope(torch.cat((tail[..., 0::2], tail[..., 1::2]), dim=-1), cos_sin)), dim=-1)


def norm_rotate_store(
    queries: Tensor,
    keys: Tensor,
    cos_sin: Tensor,
    cache: Tensor,
    scales: Tensor | None,
    slot_mapping: Tensor,
    *,
    weight: Tensor,
    eps: float,
    keep_keys: bool,
) -> Tensor | None:
    """Norm each head of the queries without a weight, and the keys with one; rotate both; store the keys.

    queries: [T, N, D], contiguous, changed in place; keys: [T, D], rows may be strided; cos_sin: [T, R] float32; cache:
    [num_blocks, block_size, 1, D], contiguous within each block; scales: those of an FP8 cache (`fp8_kv.KVScales`),
    else None; slot_mapping: [T] int64, block id × block_size + offset; weight: [D].

    Returns what was stored, [T, 1, D], or None without `keep_keys`.
    """
    if queries.is_cuda:
        from nvcli.kernels.triton.elementwise import shared_keys as kernels

        kernels.norm_rotate_store(queries, keys, cos_sin, cache, slot_mapping, weight=weight, eps=eps)
        block_size = cache.shape[1]
        return cache[slot_mapping // block_size, slot_mapping % block_size] if keep_keys else None
    queries.copy_(rotate_tail(rms_norm(queries, queries.new_ones(queries.shape[-1]), eps), cos_sin))
    stored = rotate_tail(rms_norm(keys, weight, eps).unsqueeze(1), cos_sin)
    if scales is not None:
        store_heads(cache, scales, slot_mapping, stored)
    else:
        cache[slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]] = stored
    return stored if keep_keys else None


@with_kernel("elementwise.shared_keys")
def turn(heads: Tensor, cos_sin: Tensor) -> None:
    """Rotate the last numbers of heads as `norm_rotate_store` does. heads: [T, N, D], contiguous, changed in place;
    cos_sin: [T, R] float32."""
    heads.copy_(rotate_tail(heads, cos_sin))


@with_kernel("elementwise.shared_keys")
def turn_back(results: Tensor, cos_sin: Tensor) -> None:
    """Rotate the last numbers of results by the negative of each angle, and put them in the order that keys were
    projected in. results: [T, N, D], contiguous, changed in place; cos_sin: [T, R] float32."""
    tail = results[..., results.shape[-1] - cos_sin.shape[1] :]
    cosines, sines = cos_sin.chunk(2, dim=-1)
    turned = apply_rope(tail, torch.cat((cosines, -sines), dim=-1))
    tail.copy_(torch.stack(turned.chunk(2, dim=-1), dim=-1).flatten(-2))
