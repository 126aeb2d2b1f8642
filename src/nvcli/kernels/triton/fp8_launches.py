"""How products of linear layers with FP8 weights are launched. `launch_rule.py` chooses."""

from __future__ import annotations

from typing import NamedTuple


class HopperLaunch(NamedTuple):
    """The tile of a product of many rows on Hopper GPUs (`hopper_fp8.py`)."""

    groups: int
    """Groups of warps that multiply 64 rows each: 2 or 3."""
    blocks: int
    """Blocks of 128 features: 1, or for two groups 2. A gated product has 2: one of the gate, one of up."""
    unit_tiles: int | None = 1
    """For how many times 128 input features FP8 units add up products before the sums are added up in float32. None:
    for all of them. With scales by blocks it is 1."""


class DecodeLaunch(NamedTuple):
    """How a product of the rows of a decode step is launched on Hopper GPUs (`hopper_fp8_decode.py`)."""

    row_tile: int
    """32, 64, 128 or 256."""
    num_parts: int = 1
    """Into how many parts the input features are cut, for a residual sum."""
