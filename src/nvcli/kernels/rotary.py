"""From the fused q/k/v projection to attention: the norm of Qwen3's heads, rotary positions, and the store of k and v.
Plain torch is the reference; CUDA tensors take the Triton kernel that is held to it.

The rotation is the half-split kind (GPT-NeoX, and every Hugging Face Qwen or Llama): dimension i turns with i + D/2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.fp8_kv import KVScales, store_heads
from nvcli.kernels.norm import rms_norm


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate each head by its token's angles.

    x: [T, heads, D]; cos_sin: [T, D] float32, cosines then sines of the D/2 angles → [T, heads, D], contiguous.
    """
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


@with_kernel("elementwise.rotary")
def norm_rope(
    heads: Tensor, cos_sin: Tensor | None, weight: Tensor | None, eps: float, *, norms_last: bool = False
) -> Tensor:
    """Norm each head where there is a weight, and rotate it where there are angles, with `norms_last` before it is
    normed. heads: [T, heads, D]; cos_sin: [T, D] float32; weight: [D] → [T, heads, D]."""
    if cos_sin is not None and norms_last:
        heads = apply_rope(heads, cos_sin)
    if weight is not None:
        heads = rms_norm(heads, weight, eps)
    return heads if cos_sin is None or norms_last else apply_rope(heads, cos_sin)


@with_kernel("elementwise.rotary")
def qk_norm_rope_store(
    qkv: Tensor,
    cos_sin: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    keep_keys: bool,
    norms_last: bool = False,
    norms_values: bool = False,
    value_factor: float = 1.0,
    scales: KVScales | None = None,
    static_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Cut the fused projection into q, k and v; norm each head of q and k where there are weights, and with
    `norms_values` each of v without one; rotate q and k where there are angles, with `norms_last` before they are
    normed; multiply v by `value_factor`; store k and v in the cache.

    qkv: [T, (num_heads + num_kv_heads) × D + num_kv_heads × V], used up: what it holds afterwards is undefined, except
    for the views below; cos_sin: [T, D] float32 or None; caches: [num_blocks, block_size, num_kv_heads, D or V], in
    each block token by token, with D numbers for each value too; V ≤ D; slot_mapping: [T] int64, block id × block_size
    + offset of each token (several padding tokens may share one of the null block); weights: [D] → q [T, num_heads, D],
    contiguous; k [T, num_kv_heads, D] and v [T, num_kv_heads, V], which may be views of qkv. Without `keep_keys` k is
    None, and v is as it was: what is in the cache is there alone, which saves the GPU a write to memory.

    A cache in FP8 comes with its `scales`, which lie after its keys and values in the pool. `static_scales` holds the
    scale of all the layer's keys and that of all its values, [2] float32; None: each token and head gets its own.
    """
    head_dim = k_cache.shape[-1]
    q, k, v = split_heads(qkv, num_heads, num_kv_heads, head_dim)
    q = norm_rope(q, cos_sin, q_weight, eps, norms_last=norms_last)
    k = norm_rope(k, cos_sin, k_weight, eps, norms_last=norms_last)
    if norms_values:
        v = rms_norm(v, v.new_ones(head_dim), eps)
    if value_factor != 1.0:
        v = v * value_factor
    if scales is None:
        _store(k_cache, slot_mapping, k)
        _store(v_cache, slot_mapping, v)
    else:
        k_scale, v_scale = (None, None) if static_scales is None else static_scales
        store_heads(k_cache, scales.k, slot_mapping, k, k_scale)
        store_heads(v_cache, scales.v, slot_mapping, v, v_scale)
    return q.contiguous(), k if keep_keys else None, v


def split_heads(qkv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> list[Tensor]:
    """Cut a fused projection into views: q [T, num_heads, D], k [T, num_kv_heads, D] and v [T, num_kv_heads, V]."""
    counts = num_heads, num_kv_heads, num_kv_heads
    of_values = qkv.shape[1] - (num_heads + num_kv_heads) * head_dim
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, of_values]
    parts = zip(torch.split(qkv, sizes, dim=1), counts, sizes, strict=True)
    return [part.view(len(part), count, size // count) for part, count, size in parts]


def _store(cache: Tensor, slot_mapping: Tensor, rows: Tensor) -> None:
    """Write rows [T, num_kv_heads, D] to their places in the cache."""
    rows = rows.to(cache.dtype)
    if cache.is_contiguous():
        cache.flatten(0, 1).index_copy_(0, slot_mapping, rows)
    else:
        block_size = cache.shape[1]
        cache[slot_mapping // block_size, slot_mapping % block_size] = rows
