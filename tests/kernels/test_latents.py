"""The keys of latent attention: the Triton kernel stores and rotates what plain torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8_interpreter import exact_conversions
from kernel_device import DEVICE, DTYPES, MARKS, TOLERANCE
from nvcli.attention.kv_cache import KVCache, KVCacheSpec
from nvcli.kernels import latents as reference
from nvcli.kernels.fp8_kv import dequantise_heads
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.latent_types import LatentHeads
from nvcli.kernels.triton.elementwise import latents as kernels

pytestmark = MARKS
__all__ = ["exact_conversions"]


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "plain_dim", "rope_dim", "latent_dim", "is_interleaved", "rotates"),
    [
        (20, 12, 8, 24, True, True),
        (3, 16, 16, 32, False, True),
        (3, 16, 12, 24, False, False),
        (3, 16, 0, 24, False, False),
    ],
)
def test_rotated_queries_and_stored_keys(
    num_heads: int,
    plain_dim: int,
    rope_dim: int,
    latent_dim: int,
    is_interleaved: bool,
    rotates: bool,
    dtype: torch.dtype,
    in_fp8: bool,
) -> None:
    """The queries of the first three tokens are absorbed, and those of the others rotated in place, or not at all."""
    heads = LatentHeads(
        num_heads=num_heads,
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        latent_dim=latent_dim,
        is_interleaved=is_interleaved,
    )
    generator = torch.Generator().manual_seed(0)
    num_tokens, key_dim = 5, latent_dim + rope_dim

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    projected = random(num_tokens, num_heads * (plain_dim + rope_dim) + key_dim)  # queries and latents of one product
    angles = random(num_tokens, rope_dim // 2).float()
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    weight = random(latent_dim)
    spec = KVCacheSpec(
        group_layers=((0, 1),),
        group_heads=((1, key_dim),),
        block_size=4,
        dtype=dtype,
        kv_dtype=FP8 if in_fp8 else None,
        group_value_dims=(latent_dim,),
        latent_groups=(0,),
    )
    slots = torch.tensor([3, 9, 4, 17, 0])  # the last one stands for padding
    found = []
    for module, device in ((reference, torch.device("cpu")), (kernels, DEVICE)):
        caches = KVCache(spec, 6, device)
        (cache, _), scales = caches.layer(1), caches.scales(1)
        absorbed = torch.zeros(3, num_heads, key_dim, dtype=dtype, device=device)
        queries, latents = projected.to(device).split([projected.shape[1] - key_dim, key_dim], dim=1)
        queries = queries.unflatten(1, (num_heads, -1)).clone()
        arguments: list[Any] = [queries, latents, cos_sin.to(device) if rotates else None, absorbed, cache]
        options: dict[str, Any] = {"weight": weight.to(device), "eps": 1e-6}
        if module is reference:
            arguments.append(None if scales is None else scales.k)
            options["keep_keys"] = True
        module.rotate_and_store(*arguments, slots.to(device), heads, **options)
        stored = cache.float() if scales is None else dequantise_heads(cache, scales.k.transpose(1, 2))
        found.append((queries, absorbed, stored))
    assert found[0][2].abs().sum() > 0
    for one, other in zip(*found, strict=True):
        tolerance = 0.13 if in_fp8 and one is found[0][2] else TOLERANCE[dtype]  # neighbours, where a last bit differs
        torch.testing.assert_close(other.cpu(), one, atol=TOLERANCE[dtype], rtol=tolerance)
