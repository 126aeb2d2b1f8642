"""How products with FP8 weights are launched on an H200: a table for each kind of product, written down as measured.

`fp8_linear.py` and `fp8_experts.py` choose from these tables: the launch for a number of rows is that of the first
range that holds it, and a shape that was not measured takes the ranges of the nearest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from nvcli.kernels.weight_formats import FP8Scaling


class Launch(NamedTuple):
    """The tile sizes of a product and how its programs work."""

    row_tile: int
    out_tile: int
    """Features of the result. It is at most 128 for scales by blocks, so that the features of a tile share their
    scales. The gated product of experts multiplies as many of the gate and of the up projection."""
    in_tile: int
    """128 for scales by blocks."""
    num_stages: int
    num_warps: int
    num_parts: int = 1
    """Into how many parts the input features are cut, which are multiplied by programs of their own."""


class ExpertLaunch(NamedTuple):
    """How both products of experts are launched, whose tiles of rows are the same."""

    gate_up: Launch
    down: Launch


Kind = FP8Scaling | Literal["sum"]
"""A linear layer's products: those of a scaling, and those with scales by rows for a residual sum, which takes
parts."""
Shape = tuple[int, int]
"""The output and input features of a weight."""
Ranges = tuple[tuple[int, Launch | None], ...]
"""Launches for up to so many rows, ascending. None is torch's own product. Above the last range products with scales by
rows are torch's own, and those with scales by blocks are launched as in the last range."""
ExpertRanges = tuple[tuple[int, ExpertLaunch], ...]
"""Launches for up to so many rows of an expert on average, ascending. The last one holds above its range, too."""

LINEAR: Mapping[Kind, Mapping[Shape, Ranges]] = {
    "channel": {
        (6144, 4096): (
            (16, Launch(16, 64, 128, 8, 4)),
            (32, Launch(32, 64, 128, 8, 4)),
            (64, Launch(32, 64, 256, 4, 4)),
            (128, Launch(64, 64, 128, 6, 4)),
        ),
        (24576, 4096): (
            (16, Launch(16, 128, 256, 3, 4)),
            (32, Launch(32, 128, 128, 5, 4)),
            (64, Launch(64, 128, 128, 4, 4)),
        ),
        (5120, 2048): (
            (16, Launch(16, 64, 256, 5, 4)),
            (32, Launch(32, 64, 128, 8, 4)),
            (64, Launch(32, 64, 256, 4, 4)),
            (128, Launch(64, 64, 128, 6, 4)),
        ),
        (4096, 1024): (
            (16, Launch(16, 64, 128, 8, 4)),
            (64, Launch(32, 64, 256, 4, 4)),
            (256, Launch(64, 64, 128, 6, 4)),
        ),
        (6144, 1024): (
            (16, Launch(16, 64, 256, 5, 4)),
            (64, Launch(32, 64, 256, 4, 4)),
            (128, Launch(64, 64, 128, 6, 4)),
        ),
    },
    "sum": {
        (4096, 4096): (
            (16, Launch(16, 64, 256, 5, 4, num_parts=2)),
            (32, Launch(32, 64, 128, 8, 4, num_parts=2)),
            (64, Launch(64, 32, 256, 4, 4, num_parts=2)),
            (128, Launch(64, 64, 128, 6, 4, num_parts=2)),
            (256, Launch(64, 128, 128, 4, 4, num_parts=2)),
        ),
        (4096, 12288): (
            (16, Launch(16, 64, 256, 5, 4, num_parts=2)),
            (32, Launch(32, 64, 256, 4, 4, num_parts=3)),
            (64, Launch(64, 32, 256, 4, 4, num_parts=2)),
            (128, Launch(64, 64, 128, 6, 4, num_parts=2)),
            (256, Launch(64, 128, 128, 4, 4, num_parts=2)),
        ),
        (2048, 4096): (
            (16, Launch(16, 64, 256, 5, 4, num_parts=4)),
            (32, Launch(32, 64, 256, 4, 4, num_parts=4)),
            (64, Launch(64, 32, 256, 4, 4, num_parts=4)),
            (256, Launch(64, 64, 128, 6, 4, num_parts=2)),
            (512, Launch(128, 64, 128, 4, 4, num_parts=2)),
        ),
        (1024, 2048): (
            (16, Launch(16, 64, 256, 5, 4, num_parts=4)),
            (32, Launch(32, 32, 256, 4, 4, num_parts=4)),
            (64, Launch(64, 32, 256, 4, 4, num_parts=4)),
            (256, Launch(64, 64, 128, 6, 4, num_parts=2)),
            (512, Launch(64, 128, 128, 4, 4, num_parts=2)),
        ),
        (1024, 3072): (
            (16, Launch(16, 64, 256, 5, 4, num_parts=4)),
            (32, Launch(32, 64, 256, 4, 4, num_parts=4)),
            (64, Launch(64, 32, 256, 4, 4, num_parts=4)),
            (256, Launch(64, 64, 128, 6, 4, num_parts=2)),
            (512, Launch(64, 128, 128, 4, 4, num_parts=2)),
        ),
    },
    "block": {
        (6144, 4096): (
            (16, Launch(16, 64, 128, 8, 4)),
            (64, Launch(64, 64, 128, 6, 4)),
            (512, Launch(64, 128, 128, 4, 4)),
            (8192, Launch(128, 128, 128, 4, 8)),
        ),
        (4096, 4096): (
            (16, Launch(16, 64, 128, 8, 4)),
            (64, Launch(64, 64, 128, 6, 4)),
            (512, Launch(64, 128, 128, 4, 4)),
            (8192, Launch(128, 128, 128, 4, 8)),
        ),
        (24576, 4096): (
            (16, Launch(16, 128, 128, 6, 4)),
            (512, Launch(64, 128, 128, 4, 4)),
            (8192, Launch(128, 128, 128, 4, 8)),
        ),
        (4096, 12288): (
            (16, Launch(16, 64, 128, 8, 4)),
            (64, Launch(64, 64, 128, 6, 4)),
            (512, Launch(64, 128, 128, 4, 4)),
            (8192, Launch(128, 128, 128, 4, 8)),
        ),
    },
}
EXPERTS: Mapping[FP8Scaling, ExpertRanges] = {
    "channel": (
        (1, ExpertLaunch(Launch(16, 64, 256, 3, 4), Launch(16, 64, 256, 3, 4))),
        (4, ExpertLaunch(Launch(16, 64, 256, 3, 4), Launch(16, 128, 128, 5, 4))),
        (16, ExpertLaunch(Launch(32, 64, 128, 5, 4), Launch(32, 64, 128, 6, 4))),
        (32, ExpertLaunch(Launch(64, 64, 128, 4, 4), Launch(64, 64, 128, 4, 4))),
        (128, ExpertLaunch(Launch(64, 64, 128, 4, 4), Launch(64, 128, 128, 4, 4))),
        (512, ExpertLaunch(Launch(128, 64, 128, 4, 8), Launch(128, 128, 128, 3, 4))),
    ),
    "block": (
        (4, ExpertLaunch(Launch(16, 64, 128, 6, 4), Launch(16, 128, 128, 5, 4))),
        (16, ExpertLaunch(Launch(32, 64, 128, 5, 4), Launch(32, 128, 128, 5, 4))),
        (128, ExpertLaunch(Launch(64, 64, 128, 4, 4), Launch(64, 128, 128, 4, 4))),
        (512, ExpertLaunch(Launch(128, 64, 128, 4, 8), Launch(128, 128, 128, 3, 4))),
    ),
}
