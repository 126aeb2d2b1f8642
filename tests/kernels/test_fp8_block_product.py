"""When torch's own product with scales by blocks is taken: where it is there, is right, and gets whole blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nvcli.kernels import fp8_block_product
from nvcli.kernels.fp8 import fp8_linear, quantise, quantise_weight


def product(x: torch.Tensor, weight: torch.Tensor, *, scale_a: Any, scale_b: Any, out_dtype: Any) -> torch.Tensor:
    """As torch documents its own: scales [T, G] and [G, out / 128], each with its first dimension dense."""
    assert scale_a.shape == (x.shape[0], x.shape[1] // 128)
    assert scale_a.stride() == (1, x.shape[0])
    assert scale_b.shape == (weight.shape[0] // 128, weight.shape[1] // 128)
    assert scale_b.stride(0) == weight.stride(0) == 1
    values = x.float() * scale_a.repeat_interleave(128, 1)
    spread = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (values @ (weight.float() * spread)).to(out_dtype)


def absent(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")


def wrong(*args: Any, **kwargs: Any) -> torch.Tensor:
    return 2 * product(*args, **kwargs)


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    fp8_block_product._is_right.cache_clear()
    yield
    fp8_block_product._is_right.cache_clear()


@pytest.mark.parametrize(
    ("capability", "multiply", "is_taken"),
    [((9, 0), product, True), ((8, 9), product, False), ((9, 0), absent, False), ((9, 0), wrong, False)],
)
def test_it_is_taken_where_it_is_right(
    capability: tuple[int, int], multiply: Any, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    generator = torch.Generator().manual_seed(0)
    weight, scales = quantise_weight(torch.randn(384, 1024, generator=generator), "block")
    x = quantise(torch.randn(256, 1024, generator=generator).bfloat16(), "block")
    assert fp8_block_product.takes(x, weight) == is_taken
    if is_taken:
        found = fp8_block_product.block_product(x, weight, scales)
        expected = fp8_linear(x, weight, scales, None, None)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("rows", "out", "inner", "dtype"),
    [
        (0, 384, 512, torch.bfloat16),
        (64, 384, 512, torch.bfloat16),
        (300, 384, 512, torch.bfloat16),
        (256, 400, 512, torch.bfloat16),
        (256, 384, 768, torch.bfloat16),
        (256, 384, 512, torch.float16),
    ],
)
def test_parts_of_blocks_are_left_to_the_kernel(
    rows: int, out: int, inner: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "_scaled_mm", product)
    weight, _ = quantise_weight(torch.ones(out, inner), "block")
    assert not fp8_block_product.takes(quantise(torch.ones(rows, inner, dtype=dtype), "block"), weight)
