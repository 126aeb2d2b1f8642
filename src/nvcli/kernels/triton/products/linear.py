"""Launches of products with weights of 16 bits (`products.py`), as measured on an H200.

Shapes: T rows, `in` and `out` features, P parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.activation import Activation
from nvcli.kernels.triton.products.product_launch import ProductLaunch
from nvcli.kernels.triton.products.products import multiply

_ROUTER_ROWS = 1024
"""The most rows for which a router's logits are computed in parts. Measured on an H200 (128 experts, H 2048) in
microseconds, in parts against cuBLAS: 2.7 against 4.9 for 1 row, 4.7 against 5.6 for 1,024 and 31 against 13 for
8,192."""
_FEW_FEATURES = 2048
_INVARIANT_FEW_ROWS = 64
"""Up to this number of rows, one tile holds them all. TMA is slow at tiles that lack most of their rows (Qwen3-8B's
down projection on an H200: 58 us for 16 rows, and 38 us for 64), so these are read by pointers."""
_NARROW = 4096
"""Up to this number of output features, strips are so narrow that every multiprocessor has one."""
_VERIFIED_CAPABILITY = (9, 0)
"""GPUs on which all launches were seen to give the same bits; others take one launch for all numbers of rows."""


def linear(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """See `nvcli.kernels.linear.linear`, for few rows and without a bias."""
    return multiply(x, weight, _few_rows(len(x), 256), out)


def takes_parts(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear_parts` serves these shapes and types, and a router's few features are not better left to
    cuBLAS."""
    num_features, in_features = weight.shape
    return len(x) <= _ROUTER_ROWS and weight.element_size() == 2 and num_features % 32 == in_features % 512 == 0


def linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """See `nvcli.kernels.linear.linear_for_sum`, for few rows. [P, T, out] float32, in parts of 512 features, as even
    as the tiles allow (measured: 4 for 2048, 6 for 3072)."""
    in_features = weight.shape[1]
    num_parts = max(1, in_features // 512)
    while in_features % (num_parts * 128):
        num_parts -= 1
    return multiply(x, weight, _few_rows(len(x), 128, num_parts), in_parts=True)


def gated_linear(x: Tensor, weight: Tensor, gate: Activation) -> Tensor:
    """See `nvcli.kernels.linear.gated_linear`, for few rows."""
    return multiply(x, weight, _few_rows(len(x), 128), gate=gate)


def _few_rows(num_rows: int, in_tile: int, num_parts: int = 1) -> ProductLaunch:
    row_tile = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    return ProductLaunch(
        row_tile, 32, in_tile, 4, 4, num_parts, has_constants=True, x_by_tma=False, weight_by_tma=False
    )


def gated_linear_of_many_rows(x: Tensor, weight: Tensor, gate: Activation) -> Tensor:
    """See `nvcli.kernels.linear.gated_linear`, for many rows on Hopper. cuBLAS would write both products to memory, and
    another kernel would read them.

    With 8 tiles of rows together Qwen3-0.6B's layer (1,024 features) takes 188 us for 8,192 rows under sustained load;
    cuBLAS and the activation take 204. With 16 Qwen3-8B's (4,096 features) takes 2,565 us; cuBLAS and the activation
    take 2,625, and with 4 tiles the kernel takes 2,677.
    """
    rows_together = 8 if weight.shape[1] < _FEW_FEATURES else 16
    return multiply(x, weight, ProductLaunch(128, 128, 64, 4, 8, 1, rows_together, 1, has_constants=True), gate=gate)


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """See `nvcli.kernels.invariant_linear.invariant_linear`."""
    multiply(x, weight, choose_invariant_launch(x, len(weight)), out, bias=bias)


def choose_invariant_launch(x: Tensor, out_features: int) -> ProductLaunch:
    """Choose the launch that was fastest for this number of rows. All give the same bits: input features are never
    split over programs, and the instructions for few rows and for many add up in the same order (seen on an H200)."""
    if x.element_size() > 2:  # float32 runs without tensor cores: for tests
        launch = ProductLaunch(16, 64, 32, 2, 4)
    elif x.is_cuda and torch.cuda.get_device_capability(x.device) != _VERIFIED_CAPABILITY:
        launch = ProductLaunch(64, 64, 64, 3, 4)
    else:
        launch = _measured_launch(len(x), out_features)
    if len(x) <= _INVARIANT_FEW_ROWS:
        return launch._replace(x_by_tma=False)
    return launch._replace(rows_together=8, num_programs=1)


def _measured_launch(num_rows: int, out_features: int) -> ProductLaunch:
    is_narrow = out_features <= _NARROW
    if num_rows <= _INVARIANT_FEW_ROWS:
        row_tile = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
        if is_narrow:
            return ProductLaunch(row_tile, 32, 256 if row_tile < 64 else 128, 4, 4)
        return ProductLaunch(row_tile, 64, 128, 4, 4)
    if num_rows <= 128:
        return ProductLaunch(128, 32 if is_narrow else 64, 128, 4, 4)
    if num_rows <= 256 and is_narrow:
        return ProductLaunch(128, 64, 128, 4, 8)
    if num_rows <= 512:
        return ProductLaunch(128, 128, 64, 6, 8)
    return ProductLaunch(128, 256, 64, 4, 8)
