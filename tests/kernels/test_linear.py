"""The products that `kernels/linear.py` chooses among, whichever they are, against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernel_device import DEVICE, HAS_GPU, MARKS
from nvcli.kernels.linear import linear_for_sum
from nvcli.kernels.norm import add_rms_norm, rms_norm

DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
TOLERANCE = 3e-2 if HAS_GPU else 1e-4

pytestmark = MARKS


@pytest.mark.parametrize("num_rows", [1, 100, 300, 4096])
def test_a_product_enters_the_residual_sum_once(num_rows: int) -> None:
    """Whether the product is still to be added, comes in parts, or was added already: the sum behind it is the same."""
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(num_rows, 256, generator=generator), torch.randn(num_rows, 1024, generator=generator)
    weight, scale = torch.randn(1024, 256, generator=generator) / 16, torch.randn(1024, generator=generator)
    x, residual, weight, scale = (tensor.to(DEVICE, DTYPE) for tensor in (x, residual, weight, scale))
    total = residual.float() + F.linear(x.float(), weight.float())
    delta = linear_for_sum(x, weight, residual)
    assert delta is not None or num_rows == 4096, "few rows leave the sum to the norm"
    normed = rms_norm(residual, scale, 1e-6) if delta is None else add_rms_norm(delta, residual, scale, 1e-6)
    torch.testing.assert_close(residual.float(), total, atol=TOLERANCE, rtol=TOLERANCE)
    expected = rms_norm(total.to(DTYPE), scale, 1e-6)
    torch.testing.assert_close(normed.float(), expected.float(), atol=TOLERANCE, rtol=TOLERANCE)
