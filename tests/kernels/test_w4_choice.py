"""Which kernel multiplies weights of 4 bits, and how Hopper's is launched."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from nvcli.kernels.expert_settings import GatedActivation
from nvcli.kernels.expert_types import ExpertWeights, Routes, W4Scales
from nvcli.kernels.triton import hopper_w4, w4_choice, w4_linear
from nvcli.kernels.triton.w4_launches import HOPPER_EXPERTS, HOPPER_ROWS, HopperLaunch, Kind
from nvcli.kernels.weight_formats import W4Format

GROUP_128 = W4Format("integer", 128)


@pytest.fixture(autouse=True)
def on_hopper() -> Any:
    with (
        patch.object(w4_choice, "_has_kernel", lambda device: True),
        patch.object(hopper_w4, "num_multiprocessors", lambda device: 132),
    ):
        yield


def choose(
    kind: Kind,
    rows: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    format: W4Format = GROUP_128,
    out_features: int = 6144,
) -> object:
    x, words = torch.empty(rows, 1024, dtype=dtype), torch.empty(out_features, 256, dtype=torch.int16)
    return w4_choice.choose_launch(kind, x, words, format)


@pytest.mark.parametrize("kind", HOPPER_ROWS)
def test_ranges(kind: Kind) -> None:
    least, most = HOPPER_ROWS[kind]
    for rows in (least + 1, most):
        assert isinstance(choose(kind, rows), HopperLaunch)
        assert isinstance(choose(kind, rows, dtype=torch.float16), HopperLaunch)
    for rows in (1, least):
        assert choose(kind, rows) == w4_linear.choose_launch(kind, rows)
    assert choose(kind, 4096) is None, "the library multiplies many rows"
    for other in (
        {"dtype": torch.float32},
        {"format": W4Format("integer", 64)},
        {"out_features": 6152},
    ):
        assert choose(kind, most, **other) == w4_linear.choose_launch(kind, most)


@pytest.mark.parametrize("kind", HOPPER_ROWS)
def test_launches_fit(kind: Kind) -> None:
    for rows in (33, 65, 200, 256, 500, 1024):
        for out_features, in_features in ((6144, 4096), (4096, 12288), (512, 128), (1024, 3072), (24576, 384)):
            launch = hopper_w4.choose_launch(kind, rows, out_features, in_features, torch.device("cuda"))
            out_bytes = 4 if launch.num_parts > 1 else 2
            assert hopper_w4.num_stages(launch, out_bytes, is_gated=kind == "gated") >= 2
            assert 1 <= launch.num_parts <= max(1, in_features // 256)
            assert launch.num_parts == 1 or kind != "gated"


def test_as_few_rounds_as_possible() -> None:
    """With 256 rows 128 programs multiply the gate and up projection of an 8B model at the same time."""
    launch = hopper_w4.choose_launch("gated", 256, 12288, 4096, torch.device("cuda"))
    assert launch == HopperLaunch(128, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts(dtype: torch.dtype) -> None:
    """Experts with many rows take Hopper's kernel: MXFP4 with bfloat16 alone."""
    least = HOPPER_EXPERTS[0][0]
    format = W4Format("mxfp4", 32)
    words = [torch.empty(4, rows, 32, dtype=torch.int16) for rows in (128, 64)]
    scales = W4Scales(torch.empty(4, 1, 128), torch.empty(4, 1, 64), format, format)
    weights = ExpertWeights(*words, num_others=4)
    taken = []
    with (
        patch.object(hopper_w4, "apply_experts", lambda *args: taken.append(args[-2:])),
        patch.object(w4_choice.experts, "apply_experts", lambda *args: taken.append(None)),
    ):
        for tokens in (4 * least, 4 * least + 1, 8192):
            x = torch.empty(tokens, 64, dtype=dtype)
            routes = Routes(torch.zeros(tokens, 2, dtype=torch.int32), torch.zeros(tokens, 2))
            w4_choice.apply_experts(x, routes, weights, scales, GatedActivation(), torch.empty(2, tokens, 64))
    expected = [None, HOPPER_EXPERTS[0][1], HOPPER_EXPERTS[-1][1]]
    assert taken == (expected if dtype == torch.bfloat16 else [None] * 3)
