"""How products with FP8 weights are launched on an H200: a table for each kind of product, written down as measured.

`fp8_linear.py` and `fp8_experts.py` choose from these tables: the launch for a number of rows is that of the first
range that holds it, and a shape that was not measured takes the ranges of the nearest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from nvcli.config_types import FP8Accumulation
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


Kind = FP8Scaling | Literal["sum"]
"""A linear layer's products: those of a scaling, and those with scales by rows for a residual sum, which takes
parts."""
Shape = tuple[int, int]
"""The output and input features of a weight."""
Ranges = tuple[tuple[int, Launch | None], ...]
"""Launches for up to so many rows, ascending. None is torch's own product. Above the last range products with scales by
rows are torch's own, and those with scales by blocks are launched as in the last range."""
DecodeRanges = tuple[tuple[int, DecodeLaunch | None], ...]
"""Launches of the kernel for decode steps for up to so many rows, ascending. With None, and above the last range, the
launch is that of `LINEAR`."""
ManyRowsKind = FP8Scaling | Literal["gated"]
"""Products that Hopper's kernel for many rows takes: those of a scaling; and gate and up projection with scales by
rows, with the activation."""
ManyRowsRanges = tuple[tuple[int, HopperLaunch | None], ...]
"""Launches from so many rows on, ascending. With None, and with fewer rows, other kernels multiply."""
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
_DECODE_SUMS: Mapping[Shape, DecodeRanges] = {
    (4096, 4096): ((128, None), (256, DecodeLaunch(128)), (320, DecodeLaunch(256))),
    (4096, 12288): ((64, None), (96, DecodeLaunch(64, 2)), (128, None), (256, DecodeLaunch(128, 2))),
    (4096, 14336): ((32, None), (96, DecodeLaunch(64, 2)), (256, DecodeLaunch(128, 2))),
}
DECODE: Mapping[FP8Accumulation, Mapping[Kind, Mapping[Shape, DecodeRanges]]] = {
    "exact": {
        "channel": {
            (6144, 4096): (
                (32, None),
                (64, DecodeLaunch(64)),
                (128, DecodeLaunch(128)),
                (192, DecodeLaunch(256)),
                (256, None),
                (320, DecodeLaunch(128)),
            ),
            (24576, 4096): ((128, None), (192, DecodeLaunch(256)), (256, None), (320, DecodeLaunch(128))),
            (28672, 4096): (
                (128, None),
                (160, DecodeLaunch(256)),
                (192, DecodeLaunch(128)),
                (256, None),
                (320, DecodeLaunch(128)),
            ),
        },
        "sum": {
            **_DECODE_SUMS,
            (4096, 12288): (*_DECODE_SUMS[4096, 12288], (320, DecodeLaunch(128))),
            (4096, 14336): (*_DECODE_SUMS[4096, 14336], (320, DecodeLaunch(128))),
        },
    },
    "fast": {
        "channel": {
            (6144, 4096): ((32, None), (64, DecodeLaunch(64)), (128, DecodeLaunch(128))),
            (24576, 4096): ((128, None), (192, DecodeLaunch(256))),
        },
        "sum": _DECODE_SUMS,
    },
}
"""Where the kernel for decode steps is faster than what `LINEAR` says, by how torch's own product adds up. Shapes that
do not stand here do without it."""
_BY_BLOCKS: Mapping[Shape, ManyRowsRanges] = {(4096, 4096): ((1024, HopperLaunch(2, 1)), (4096, HopperLaunch(3, 1)))}
_UNTIL_384: ManyRowsRanges = ((321, HopperLaunch(3, 1)), (385, None))
MANY_ROWS: Mapping[FP8Accumulation, Mapping[ManyRowsKind, Mapping[Shape, ManyRowsRanges]]] = {
    "exact": {
        "channel": {
            (6144, 4096): (*_UNTIL_384, (6144, HopperLaunch(2, 2, 2))),
            (4096, 4096): ((6144, HopperLaunch(2, 2, 2)),),
            (24576, 4096): _UNTIL_384,
            (4096, 12288): ((6144, HopperLaunch(2, 2, 2)),),
        },
        "block": _BY_BLOCKS,
        "gated": {
            (24576, 4096): ((1024, HopperLaunch(2, 2, 2)),),
            (28672, 4096): ((1024, HopperLaunch(2, 2, 2)),),
        },
    },
    "fast": {
        "channel": {
            (6144, 4096): _UNTIL_384,
            (4096, 12288): ((1024, HopperLaunch(2, 2, None)),),
        },
        "block": _BY_BLOCKS,
        "gated": {(24576, 4096): ((1024, HopperLaunch(2, 2, None)),)},
    },
}
"""Where Hopper's kernel for many rows is the faster one, by how products are added up, or takes less energy: in steps
of many rows the GPU's power sets the time. Gated products were measured with results in 16 bits and the pass that
quantises them. Products with scales by blocks are torch's own where it takes them."""
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
