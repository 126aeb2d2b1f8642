"""The keys of latent attention: the Triton kernel stores and rotates what plain torch does."""

from __future__ import annotations

import pytest
import torch

from kernel_device import DEVICE, DTYPES, MARKS, TOLERANCE
from nvcli.kernels import latents as reference
from nvcli.kernels.latent_types import LatentHeads
from nvcli.kernels.triton.elementwise import latents as kernels

pytestmark = MARKS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "plain_dim", "rope_dim", "latent_dim", "is_interleaved"),
    [(20, 12, 8, 24, True), (3, 16, 16, 32, False)],
)
def test_rotated_queries_and_stored_keys(
    num_heads: int, plain_dim: int, rope_dim: int, latent_dim: int, is_interleaved: bool, dtype: torch.dtype
) -> None:
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
    weight, cache = random(latent_dim), random(6, 4, 1, key_dim)[1:]
    slots = torch.tensor([3, 9, 4, 17, 0])  # the last one stands for padding
    found = [
        (absorbed, stored)
        for absorbed, stored in (
            (torch.zeros(num_tokens, num_heads, key_dim, dtype=dtype), cache.clone()),
            (torch.zeros(num_tokens, num_heads, key_dim, dtype=dtype, device=DEVICE), cache.clone().to(DEVICE)),
        )
    ]
    for module, (absorbed, stored) in zip((reference, kernels), found, strict=True):
        queries, latents = projected.to(stored.device).split([projected.shape[1] - key_dim, key_dim], dim=1)
        arguments = queries.unflatten(1, (num_heads, -1)), latents, cos_sin.to(stored.device), absorbed, stored
        options = {"weight": weight.to(stored.device), "eps": 1e-6}
        if module is reference:
            options["keep_keys"] = True
        module.rotate_and_store(*arguments, slots.to(stored.device), heads, **options)
    assert not torch.equal(found[0][1], cache)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other.cpu(), one, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
