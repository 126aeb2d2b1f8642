"""Copies of keys and values from block to block: the Triton kernel against plain torch, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kernel_device import DEVICE, DTYPES, MARKS
from nvcli.attention.kv_cache import KVCache, KVCacheSpec
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.key_copies import KeyCopies, copy_keys
from nvcli.kernels.triton.attention import key_copies

pytestmark = MARKS
CPU = torch.device("cpu")

COPIES = [(3, 5, 0, 16), (3, 1, 0, 5), (9, 1, 5, 11), (2, 7, 3, 4), (4, 6, 0, 1), (8, 10, 15, 16)]


def filled_cache(
    heads: tuple[tuple[int, int], ...], dtype: torch.dtype, kv_dtype: torch.dtype | None, device: torch.device
) -> KVCache:
    """A cache of random bytes, of two layers for each KV group."""
    spec = KVCacheSpec(
        group_layers=tuple((2 * group, 2 * group + 1) for group in range(len(heads))),
        group_heads=heads,
        block_size=16,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    cache = KVCache(spec, 11, device)
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 256, (cache.num_bytes,), dtype=torch.uint8, generator=generator)
    cache.data.view(-1).view(torch.uint8).copy_(numbers)
    return cache


@pytest.mark.parametrize("heads", [((2, 64),), ((3, 16), (1, 64))])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_copies_what_plain_torch_does(
    heads: tuple[tuple[int, int], ...], kv_dtype: torch.dtype | None, dtype: torch.dtype
) -> None:
    """Layers one behind the other, and of several shapes in each block; all other bytes stay as they are."""
    expected = filled_cache(heads, dtype, kv_dtype, CPU)
    before = expected.data.view(torch.uint8).clone()
    found = filled_cache(heads, dtype, kv_dtype, DEVICE)
    copies = torch.tensor(COPIES, dtype=torch.int32)
    for layer in range(1, 2 * len(heads)):
        copy_keys(*expected.layer(layer), expected.scales(layer), copies)
        key_copies.copy_keys(*found.layer(layer), found.scales(layer), copies.to(DEVICE))
        k, v = expected.layer(layer)
        for source, target, first, end in COPIES:
            for numbers in (k, v) if kv_dtype is None else (k.view(torch.uint8), v.view(torch.uint8)):
                bits = numbers.view(torch.uint8)
                assert torch.equal(bits[target, first:end], bits[source, first:end])
    assert torch.equal(found.data.view(torch.uint8).cpu(), expected.data.view(torch.uint8))
    changed = (before != expected.data.view(torch.uint8)).float().mean()
    assert 0 < changed < 0.4


@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_one_launch_copies_in_all_layers(kv_dtype: torch.dtype | None) -> None:
    """One launch equals plain torch in each layer, where the keys of all KV groups have one shape."""
    expected, found = (filled_cache(((2, 64), (2, 64)), torch.float32, kv_dtype, device) for device in (CPU, DEVICE))
    entries = torch.tensor(COPIES, dtype=torch.int32)
    expected.copy_keys(KeyCopies(entries=entries, of_groups=[entries[:2], entries[2:]]))
    k_cache, v_cache = found.layer(0)
    layers = {"num_layers": len(found.data), "layer_stride": found.data.stride(0)}
    key_copies.copy_keys(k_cache, v_cache, found.scales(0), entries.to(DEVICE), **layers)
    assert torch.equal(found.data.view(torch.uint8).cpu(), expected.data.view(torch.uint8))
    again = filled_cache(((2, 64), (2, 64)), torch.float32, kv_dtype, DEVICE)
    entries = entries.to(DEVICE)
    again.copy_keys(KeyCopies(entries=entries, of_groups=[entries[:2], entries[2:]]))
    assert torch.equal(again.data.view(torch.uint8), found.data.view(torch.uint8))


def test_nothing_is_copied_without_copies() -> None:
    cache = filled_cache(((2, 64),), torch.float32, None, DEVICE)
    before = cache.data.view(torch.uint8).clone()
    copy_keys(*cache.layer(0), None, torch.zeros(0, 4, dtype=torch.int32, device=DEVICE))
    assert torch.equal(cache.data.view(torch.uint8), before)
