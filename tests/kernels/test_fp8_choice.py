"""Which products with FP8 weights Hopper's kernel for many rows multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from nvcli.kernels.fp8 import quantise
from nvcli.kernels.fp8_types import FP8, QuantisedRows
from nvcli.kernels.triton import fp8_choice
from nvcli.kernels.triton.fp8_launches import MANY_ROWS, HopperLaunch
from nvcli.kernels.weight_formats import FP8Scaling

FEW, MANY, FAST = HopperLaunch(2, 1), HopperLaunch(2, 2), HopperLaunch(2, 2, None)
RANGES = {(4096, 1024): ((512, FEW), (2048, MANY), (4096, None)), (1024, 4096): ((1024, MANY),)}


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    """One that is not what was measured."""
    exact = {"channel": RANGES, "block": {(4096, 1024): ((1024, FEW),)}, "gated": RANGES}
    tables = {"exact": exact, "fast": {**exact, "channel": {(4096, 1024): ((1, FAST),)}}}
    fp8_choice._ranges.cache_clear()
    with patch.object(fp8_choice, "MANY_ROWS", tables), patch.object(fp8_choice, "_has_kernel", lambda device: True):
        yield
    fp8_choice._ranges.cache_clear()


def rows(count: int, in_features: int, scaling: FP8Scaling = "channel") -> QuantisedRows:
    return quantise(torch.zeros(count, in_features, dtype=torch.bfloat16), scaling)


def weight(out: int, in_features: int) -> torch.Tensor:
    return torch.zeros(out, in_features).to(FP8)


def linear(count: int, shape: tuple[int, int], scaling: FP8Scaling = "channel") -> HopperLaunch | None:
    return fp8_choice.choose_linear(rows(count, shape[1], scaling), weight(*shape), "exact")


def test_ranges() -> None:
    shape = (4096, 1024)
    chosen = [linear(count, shape) for count in (1, 511, 512, 2047, 2048, 4096)]
    assert chosen == [None, None, FEW, FEW, MANY, None]
    assert fp8_choice.choose_linear(rows(512, 1024), weight(*shape), "fast") == FAST
    assert fp8_choice.choose_gated(rows(512, 1024), weight(*shape), "exact") == FEW
    assert fp8_choice.choose_gated(rows(512, 1024, "block"), weight(*shape), "exact") is None
    assert fp8_choice.choose_gated(rows(512, 1024), weight(4096 + 128, 1024), "exact") is None, "no whole block"


def test_shapes_that_were_not_measured() -> None:
    assert linear(2048, (1024, 2048)) is None
    assert fp8_choice.choose_gated(rows(2048, 2048), weight(4096, 2048), "exact") is None
    assert linear(2048, (1024, 2048), "block") == FEW, "as the nearest one has it"


@pytest.mark.parametrize(
    ("dtype", "in_features", "has_kernel"), [(torch.float32, 1024, True), (torch.float16, 1024, False)]
)
def test_what_it_does_not_take(dtype: torch.dtype, in_features: int, has_kernel: bool) -> None:
    with patch.object(fp8_choice, "_has_kernel", lambda device: has_kernel):
        x = rows(2048, in_features)._replace(dtype=dtype)
        assert fp8_choice.choose_linear(x, weight(4096, in_features), "exact") is None
        assert fp8_choice.choose_gated(x, weight(4096, in_features), "exact") is None


def test_launches_as_measured_are_those_that_there_are() -> None:
    """Two blocks take two groups of warps, and scales by blocks one block and one tile in a unit."""
    for by_kind in MANY_ROWS.values():
        for kind, by_shape in by_kind.items():
            for ranges in by_shape.values():
                assert [least for least, _ in ranges] == sorted({least for least, _ in ranges})
                for launch in filter(None, (launch for _, launch in ranges)):
                    assert (launch.groups, launch.blocks) in ((2, 1), (3, 1), (2, 2))
                    assert kind != "gated" or launch.blocks == 2
                    assert kind != "block" or (launch.blocks, launch.unit_tiles) == (1, 1)
