"""Products with FP8 weights, by one of three kernels: that for all GPUs (`products.py`), and on Hopper GPUs those for
the rows of a decode step (`hopper_fp8_decode.py`) and for many rows (`hopper_fp8.py`). `launch_rule.py` chooses.

Shapes: T rows, `in` and `out` features, P parts.
"""

from __future__ import annotations

from torch import Tensor

from nvcli.kernels.fp8_types import Activations, QuantisedRows
from nvcli.kernels.triton.products.product_launch import DecodeLaunch, HopperFP8Launch, ProductLaunch
from nvcli.kernels.triton.products.products import multiply

_MANY_ROWS = 64
_ROWS_TOGETHER = 8
"""How many tiles of _MANY_ROWS rows or more are computed before the next features. There are only a few smaller
ones."""
_PLAIN = (
    (16, ProductLaunch(16, 64, 128, 3, 4)),
    (32, ProductLaunch(32, 64, 128, 3, 4)),
    (64, ProductLaunch(64, 64, 64, 3, 4)),
    (128, ProductLaunch(128, 128, 64, 3, 8)),
)
"""(Maximum rows, launch) for plain activations; the last launch also serves more rows. They were not measured. Their
tiles fit the 99 KiB of shared memory of the smallest GPUs without FP8 units."""


def choose_plain_launch(num_rows: int) -> ProductLaunch:
    """Choose the launch for a number of rows of plain activations."""
    return next((launch for most_rows, launch in _PLAIN if num_rows <= most_rows), _PLAIN[-1][1])


def fp8_linear(
    x: Activations,
    weight: Tensor,
    scales: Tensor,
    launch: ProductLaunch | DecodeLaunch | HopperFP8Launch,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `nvcli.kernels.fp8.fp8_linear` or `fp8_weight_linear`, without a bias; or with a launch of several parts
    `fp8_linear_for_sum`. `in` is a multiple of 16."""
    if isinstance(launch, ProductLaunch):
        if launch.row_tile >= _MANY_ROWS:
            launch = launch._replace(rows_together=_ROWS_TOGETHER)
        return multiply(x, weight, launch, out, scales=scales, in_parts=launch.num_parts > 1)
    assert isinstance(x, QuantisedRows)
    if isinstance(launch, DecodeLaunch):
        from nvcli.kernels.triton.products import hopper_fp8_decode

        return hopper_fp8_decode.linear(x, weight, scales, launch, out)
    from nvcli.kernels.triton.products import hopper_fp8

    return hopper_fp8.linear(x, weight, scales, launch, out)
