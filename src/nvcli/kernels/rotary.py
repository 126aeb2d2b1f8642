"""Rotary position embedding of queries and keys, with the norm of Qwen3's heads. Plain torch: the reference.

The rotation is the half-split kind (GPT-NeoX, and every Hugging Face Qwen or Llama): dimension i turns with i + D/2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.norm import rms_norm


def apply_rope(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate each head by its token's angles.

    x: [T, heads, D]; cos_sin: [T, D] float32, cosines then sines of the D/2 angles → [T, heads, D], contiguous.
    """
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def qk_norm_rope(
    qkv: Tensor,
    cos_sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the fused projection into q, k and v; norm each head of q and k where there are weights; rotate q and k.

    qkv: [T, (num_heads + 2 num_kv_heads) × D]; cos_sin: [T, D] float32; weights: [D]
    → q [T, num_heads, D], k and v [T, num_kv_heads, D]; v is a view of qkv.
    """
    head_dim = cos_sin.shape[-1]
    heads = qkv.view(-1, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = heads[:, :num_heads], heads[:, num_heads:-num_kv_heads], heads[:, -num_kv_heads:]
    if q_weight is not None:
        q = rms_norm(q, q_weight, eps)
    if k_weight is not None:
        k = rms_norm(k, k_weight, eps)
    return apply_rope(q, cos_sin), apply_rope(k, cos_sin), v
