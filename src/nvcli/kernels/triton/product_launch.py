"""How a product is launched (`products.py`)."""

from __future__ import annotations

from typing import Literal, NamedTuple

Gate = Literal["silu", "gelu_tanh"]
"""The function on the gate of a product of gate and up projection (`kernels/activation.py`)."""


class ProductLaunch(NamedTuple):
    """The tile sizes of a product and how its programs work."""

    row_tile: int
    out_tile: int
    """Features of the result; a gated product multiplies as many of the gate and of the up projection. It is at most
    128 for scales by blocks, so that the features of a tile share their scales."""
    in_tile: int
    """128 for scales by blocks and for weights of 4 bits."""
    num_stages: int
    num_warps: int
    num_parts: int = 1
    """Into how many parts the input features are cut, which are multiplied by programs of their own."""
    rows_together: int = 0
    """How many tiles of rows are taken before the next features; 0: all."""
    num_programs: int = 0
    """How many programs of each multiprocessor take tile after tile; 0: a program takes one tile."""
    has_constants: bool = False
    """Whether the numbers of features are constants of the kernel, which is then compiled for each shape. That brings
    up to 8 % with few rows of 16 bits, and 4 to 11 % for the gated product of many, on an H200."""
    x_by_tma: bool = True
    weight_by_tma: bool = True
    """Whether TMA fetches these, or pointers do. Words of 4-bit codes and their activations are read by pointers."""
