"""A fixture for tests that compare the bits of interpreted Triton kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernel_device import HAS_GPU


def product(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """`a` [..., m, k] times `b` [..., k, n], each element the sum of its k terms from the first to the last."""
    a, b = a.astype(dtype), b.astype(dtype)
    total = a[..., :, :1] * b[..., :1, :]
    for k in range(1, a.shape[-1]):
        total += a[..., :, k, None] * b[..., k, None, :]
    return total


@pytest.fixture(autouse=True)
def products_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """An element of a product has the same bits in any row of a tile, as on a GPU.

    Triton's interpreter multiplies with numpy. Its BLAS library chooses by the processor how it sums, and on some
    (AMD's Zen, Intel's Haswell) the last rows of a matrix are summed in another order than the first.
    """
    if not HAS_GPU:
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter.np, "matmul", product)
