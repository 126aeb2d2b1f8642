"""How products with weights of 4 bits are launched: a table for each kind of product, as measured on an H200.

`w4_linear.py` chooses from these tables: the launch for a number of rows is that of the first range that holds it. On
other GPUs, and for numbers of more than 16 bits, tiles are made as small as memory asks for. `w4_choice.py` says where
the launches for Hopper GPUs take their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from nvcli.kernels.triton.product_launch import ProductLaunch


class HopperLaunch(NamedTuple):
    """How the kernel for Hopper GPUs (`hopper_w4.py`) is launched."""

    row_tile: int
    """Rows of activations: 16, 32, 64 or 128."""
    blocks: int
    """Blocks of 64 rows of a weight that each of a program's two groups of warps multiplies: 1 to 3."""
    num_parts: int = 1
    """Into how many parts the input features are cut, which are multiplied by programs of their own."""


Kind = Literal["plain", "sum", "gated"]
"""What a layer's product is like: its result is in 16 bits, or in float32 parts for a residual sum, or gate and up
projection are multiplied side by side, up to the activation."""
Ranges = tuple[tuple[int, ProductLaunch | None], ...]
"""Launches for up to so many rows, ascending. None, and above the last range: the weight is turned into 16 bits in
memory, which the library multiplies; for `gated`: a plain product, with the activation behind it."""

LINEAR: Mapping[Kind, Ranges] = {
    "plain": (
        (16, ProductLaunch(16, 64, 128, 6, 4)),
        (256, ProductLaunch(64, 128, 128, 3, 4)),
    ),
    "sum": (
        (16, ProductLaunch(16, 128, 128, 4, 4)),
        (64, ProductLaunch(64, 128, 128, 3, 4)),
        (128, ProductLaunch(128, 128, 128, 3, 8)),
        (256, ProductLaunch(64, 128, 128, 3, 4)),
    ),
    "gated": ((16, ProductLaunch(16, 64, 128, 4, 4)),),
}
HOPPER_ROWS: Mapping[Kind, tuple[int, int]] = {"plain": (64, 256), "sum": (64, 1024), "gated": (64, 1024)}
"""The kernel for Hopper GPUs multiplies more rows than the first number, up to the second one."""
HOPPER_EXPERTS: tuple[tuple[int, tuple[HopperLaunch, HopperLaunch]], ...] = (
    (256, (HopperLaunch(128, 2), HopperLaunch(128, 2))),
)
"""Launches of that kernel for gate and up, and down projection, for more rows of an expert on average, ascending."""
