"""How products with weights of 4 bits are launched: a table for each kind of product, as measured on an H200.

`w4_linear.py` chooses from the tables of `Launch`: the launch for a number of rows is that of the
first range that holds it. On other GPUs, and for numbers of more than 16 bits, tiles are made as small as memory asks
for. `w4_choice.py` says where the launches for Hopper GPUs take their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class Launch(NamedTuple):
    """The tile sizes of a product and how its programs work."""

    row_tile: int
    out_tile: int
    """Features of the result; a product of gate and up projection multiplies as many of both."""
    num_stages: int
    num_warps: int
    num_programs: int = 0
    """How many programs there should be: where there are fewer tiles, programs share the input features of one. Those
    of gate and up projection and of experts are not shared."""


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
Ranges = tuple[tuple[int, Launch | None], ...]
"""Launches for up to so many rows, ascending. None, and above the last range: the weight is turned into 16 bits in
memory, which the library multiplies; for `gated`: a plain product, with the activation behind it."""

LINEAR: Mapping[Kind, Ranges] = {
    "plain": (
        (16, Launch(16, 64, 6, 4)),
        (256, Launch(64, 128, 3, 4)),
    ),
    "sum": (
        (16, Launch(16, 128, 4, 4, 264)),
        (64, Launch(64, 128, 3, 4, 264)),
        (128, Launch(128, 128, 3, 8, 132)),
        (256, Launch(64, 128, 3, 4, 264)),
    ),
    "gated": ((16, Launch(16, 64, 4, 4)),),
}
HOPPER_ROWS: Mapping[Kind, tuple[int, int]] = {"plain": (64, 256), "sum": (64, 1024), "gated": (64, 1024)}
"""The kernel for Hopper GPUs multiplies more rows than the first number, up to the second one."""
HOPPER_EXPERTS: tuple[tuple[int, tuple[HopperLaunch, HopperLaunch]], ...] = (
    (256, (HopperLaunch(128, 2), HopperLaunch(128, 2))),
)
"""Launches of that kernel for gate and up, and down projection, for more rows of an expert on average, ascending."""
