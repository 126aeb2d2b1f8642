"""Keys and values in FP8: what rounding costs, and the store kernel against its reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.attention.kv_cache import KVCache, KVCacheSpec
from nvcli.kernels import rotary as reference
from nvcli.kernels.fp8_kv import dequantise_heads, gather_blocks, quantise_heads
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.triton.elementwise import rotary

pytestmark = MARKS


@pytest.fixture
def sound_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cuts bfloat16 off, and loses the carry of e4m3 numbers that are rounded up to the next power
    of two (as of 3.7)."""
    if HAS_GPU:
        return
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_soundly(numbers, input_dtype, output_dtype, rounding_mode):  # type: ignore[no-untyped-def]
        rounded = {"fp8e4nv": (FP8, torch.uint8), "bf16": (torch.bfloat16, torch.uint16)}
        if str(input_dtype) != "fp32" or str(output_dtype) not in rounded:
            return convert(numbers, input_dtype, output_dtype, rounding_mode)
        dtype, bits = rounded[str(output_dtype)]
        floats = torch.from_numpy(np.array(numbers).view(np.float32))
        return floats.to(dtype).view(bits).numpy().reshape(numbers.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert_soundly)


def test_each_head_keeps_its_numbers_to_a_sixteenth() -> None:
    """Heads of very different sizes, and numbers within a head down to a 28,000th of its largest."""
    x = torch.randn(7, 3, 64) * torch.logspace(-20, 20, 7).view(-1, 1, 1)
    numbers, scale = quantise_heads(x)
    found = dequantise_heads(numbers, scale)
    amax = x.abs().amax(-1, keepdim=True)
    # Half of the last of three bits; the smallest numbers are 2**-9 apart, and the scale's rounding clips the largest.
    assert bool(((found - x).abs() <= x.abs() / 16 + amax / 448 * 2**-9).all())
    assert torch.equal(quantise_heads(found)[0].float(), numbers.float())


def test_every_number_of_the_format_is_read_back() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).view(2, 128)
    found = dequantise_heads(numbers, torch.tensor([1.0, 0.25]).to(torch.bfloat16))
    expected = numbers.float() * torch.tensor([[1.0], [0.25]])
    finite = expected.isfinite()
    assert torch.equal(found[finite], expected[finite])
    assert int(finite.sum()) == 254


@pytest.mark.parametrize("static", [None, 0.01])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_spoils_its_head_alone(bad: float, static: float | None) -> None:
    x = torch.ones(2, 8)
    x[1, 3] = bad
    found = dequantise_heads(*quantise_heads(x, None if static is None else torch.tensor(static)))
    assert found[0].isfinite().all()
    assert not found[1].isfinite().any()


def test_zeros_stay_zeros_and_a_scale_of_the_checkpoint_clips() -> None:
    assert torch.equal(dequantise_heads(*quantise_heads(torch.zeros(2, 8))), torch.zeros(2, 8))
    found = dequantise_heads(*quantise_heads(torch.tensor([[0.5, 1.0, 1000.0, -1000.0]]), torch.tensor(1 / 448)))
    torch.testing.assert_close(found, torch.tensor([[0.5, 1.0, 1.0, -1.0]]), rtol=1 / 16, atol=0)


@pytest.mark.usefixtures("sound_rounding")
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("head_dims", [(64,), (96, 32)], ids=str)
def test_the_store_kernel(head_dims: tuple[int, ...], static: bool) -> None:
    """Blocks of one layer that lie side by side, and blocks that hold layers of several shapes."""
    num_heads, num_kv_heads, block_size = 4, 2, 16
    spec = KVCacheSpec(
        group_layers=tuple((group,) for group in range(len(head_dims))),
        group_heads=tuple((num_kv_heads, size) for size in head_dims),
        block_size=block_size,
        dtype=torch.float32,
        kv_dtype=FP8,
    )
    head_dim = head_dims[0]
    slots = torch.tensor([3 * 16 + 15, 2 * 16, 0, 16 + 7, 5])
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator)
    qkv[2] *= 1e-3
    angles = torch.rand(5, head_dim // 2, generator=generator) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    weights = torch.rand(2, head_dim, generator=generator)
    scales = torch.tensor([0.01, 0.002])

    def store(function, device):  # type: ignore[no-untyped-def]
        cache = KVCache(spec, 4, torch.device(device))
        function(
            qkv.to(device, copy=True),
            cos_sin.to(device),
            *cache.layer(0),
            slots.to(device),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            q_weight=weights[0].to(device),
            k_weight=weights[1].to(device),
            eps=1e-6,
            keep_keys=False,
            static_scales=scales.to(device) if static else None,
            scales=cache.scales(0),
        )
        return cache

    found, expected = store(rotary.qk_norm_rope_store, DEVICE), store(reference.qk_norm_rope_store, "cpu")
    for part in range(2):
        numbers, expected_numbers = read(found, part), read(expected, part)
        # Kernel and reference may round to neighbours where they differ in float32's last places.
        torch.testing.assert_close(numbers, expected_numbers, rtol=1 / 7, atol=3e-5)
        assert (numbers != expected_numbers).float().mean() < 0.01
        expected_scales = expected.scales(0)[part]  # type: ignore[index]
        torch.testing.assert_close(found.scales(0)[part].cpu(), expected_scales, rtol=1e-2, atol=0)  # type: ignore[index]
        assert (expected_scales != 0).sum() == len(slots) * num_kv_heads
    # No other byte was touched.
    assert int((found.data.cpu() != 0).sum()) <= int((expected.data != 0).sum()) + 20


def read(cache: KVCache, part: int) -> Tensor:
    """All keys (part 0) or values (part 1) of the first layer, as numbers."""
    numbers, scales = cache.layer(0)[part], cache.scales(0)
    assert scales is not None
    out = torch.empty(numbers.shape, device=numbers.device)
    return gather_blocks(numbers, scales[part], torch.arange(len(numbers), device=numbers.device), out).cpu()


def test_blocks_of_all_kinds_are_cleared_and_counted() -> None:
    """The plan's bytes are the pool's, and a cleared block has neither numbers nor scales."""
    spec = KVCacheSpec(
        group_layers=((0, 2), (1, 3)), group_heads=((2, 64), (2, 64)), block_size=16, dtype=torch.float32, kv_dtype=FP8
    )
    cache = KVCache(spec, 5, torch.device("cpu"))
    part = 16 * 2 * (64 + 2)
    assert cache.num_bytes == 5 * spec.block_bytes == 5 * 2 * 2 * (part + -part % 128)
    cache.data.fill_(1)
    cache.clear(torch.tensor([2, 4]))
    for layer in range(4):
        scales = cache.scales(layer)
        assert scales is not None
        for numbers, scale in zip(cache.layer(layer), scales, strict=True):
            assert [bool((part.float() == 0).all()) for part in numbers] == [False, False, True, False, True]
            assert [bool((part == 0).all()) for part in scale] == [False, False, True, False, True]
