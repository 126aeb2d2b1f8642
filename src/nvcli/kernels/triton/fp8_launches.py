"""How products with FP8 weights are launched. `launch_rule.py` chooses for linear layers, and `fp8_experts.py` for
experts, from a table as measured on an H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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


class HopperLaunch(NamedTuple):
    """The tile of a product of many rows on Hopper GPUs (`hopper_fp8.py`)."""

    groups: int
    """Groups of warps that multiply 64 rows each: 2 or 3."""
    blocks: int
    """Blocks of 128 features: 1, or for two groups 2. A gated product has 2: one of the gate, one of up."""
    unit_tiles: int | None = 1
    """For how many times 128 input features FP8 units add up products before the sums are added up in float32. None:
    for all of them. With scales by blocks it is 1."""


class ExpertLaunch(NamedTuple):
    """How both products of experts are launched, whose tiles of rows are the same."""

    gate_up: Launch
    down: Launch


class DecodeLaunch(NamedTuple):
    """How a product of the rows of a decode step is launched on Hopper GPUs (`hopper_fp8_decode.py`)."""

    row_tile: int
    """32, 64, 128 or 256."""
    num_parts: int = 1
    """Into how many parts the input features are cut, for a residual sum."""


ExpertRanges = tuple[tuple[int, ExpertLaunch], ...]
"""Launches for up to so many rows of an expert on average, ascending. The last one holds above its range, too."""

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
