"""Keys that are values, too: the Triton kernels norm, rotate and store what plain torch does, and turn results back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8_interpreter import exact_conversions
from kernel_device import DEVICE, DTYPES, MARKS, TOLERANCE
from nvcli.attention.kv_cache import KVCache, KVCacheSpec
from nvcli.kernels import shared_keys as reference
from nvcli.kernels.fp8_kv import dequantise_heads
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.triton.elementwise import shared_keys as kernels

pytestmark = MARKS
__all__ = ["exact_conversions"]
NUM_TOKENS = 5


def angles_of(generator: torch.Generator, rope: int) -> torch.Tensor:
    angles = torch.randn(NUM_TOKENS, rope // 2, generator=generator)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_heads", "size", "rope"), [(20, 32, 8), (3, 24, 12)])
def test_queries_and_stored_keys(num_heads: int, size: int, rope: int, dtype: torch.dtype, in_fp8: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(NUM_TOKENS, num_heads, size, generator=generator).to(dtype)
    projected = torch.randn(NUM_TOKENS, 16 + size, generator=generator).to(dtype)  # keys behind other columns
    cos_sin, weight = angles_of(generator, rope), torch.randn(size, generator=generator).to(dtype)
    spec = KVCacheSpec(
        group_layers=((0, 1),),
        group_heads=((1, size),),
        block_size=4,
        dtype=dtype,
        kv_dtype=FP8 if in_fp8 else None,
        group_value_dims=(size,),
        latent_groups=(0,),
    )
    slots = torch.tensor([3, 9, 4, 17, 0])  # the last one stands for padding
    found = []
    for module, device in ((reference, torch.device("cpu")), (kernels, DEVICE)):
        caches, own = KVCache(spec, 6, device), queries.to(device).clone()
        (cache, _), scales = caches.layer(1), caches.scales(1)
        arguments: list[Any] = [own, projected.to(device)[:, 16:], cos_sin.to(device), cache]
        options: dict[str, Any] = {"weight": weight.to(device), "eps": 1e-6}
        if module is reference:
            arguments.append(None if scales is None else scales.k)
            options["keep_keys"] = True
        module.norm_rotate_store(*arguments, slots.to(device), **options)
        found.append((own, cache.float() if scales is None else dequantise_heads(cache, scales.k.transpose(1, 2))))
    assert found[0][1].abs().sum() > 0
    torch.testing.assert_close(found[1][0].cpu(), found[0][0], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    tolerance = 0.13 if in_fp8 else TOLERANCE[dtype]  # neighbours, where a last bit differs
    torch.testing.assert_close(found[1][1].cpu(), found[0][1], atol=TOLERANCE[dtype], rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_turned_back(dtype: torch.dtype) -> None:
    """What was rotated is as it was, in its old order."""
    generator = torch.Generator().manual_seed(0)
    x, cos_sin = torch.randn(NUM_TOKENS, 20, 24, generator=generator).to(dtype), angles_of(generator, 12)
    rotated = reference.rotate_tail(x, cos_sin)
    by_kernel = rotated.to(DEVICE).clone()
    reference.turn_back(rotated, cos_sin)
    kernels.turn_back(by_kernel, cos_sin.to(DEVICE))
    for found in (rotated, by_kernel.cpu()):
        torch.testing.assert_close(found, x, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
