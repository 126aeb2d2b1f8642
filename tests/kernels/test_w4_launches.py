"""Which kernel multiplies weights of 4 bits, and how Hopper's is launched."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.expert_types import ExpertMatrix
from nvcli.kernels.triton.products import expert_launches, hopper_w4, w4_linear
from nvcli.kernels.triton.products.product_launch import HopperW4Launch, Kind
from nvcli.kernels.triton.products.w4_linear import HOPPER_EXPERT_ROWS, HOPPER_ROWS, HOPPER_ROWS_OF_8_BITS, LINEAR
from nvcli.kernels.weight_formats import W4Format

GROUP_128 = W4Format("integer", 128)


@pytest.fixture(autouse=True)
def on_hopper() -> Any:
    with (
        patch.object(w4_linear, "has_hopper_kernel", lambda device: True),
        patch.object(hopper_w4, "num_multiprocessors", lambda device: 132),
    ):
        yield


def of_table(kind: Kind, rows: int) -> object:
    return next((launch for most, launch in LINEAR[kind] if rows <= most), None)


def choose(
    kind: Kind,
    rows: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    format: W4Format = GROUP_128,
    out_features: int = 6144,
) -> object:
    x, words = torch.empty(rows, 1024, dtype=dtype), torch.empty(out_features, 256, dtype=torch.int16)
    return w4_linear.choose_w4_launch(kind, x, words, format)


@pytest.mark.parametrize("kind", HOPPER_ROWS)
def test_ranges(kind: Kind) -> None:
    least, most = HOPPER_ROWS[kind]
    for rows in (least + 1, most):
        assert isinstance(choose(kind, rows), HopperW4Launch)
        assert isinstance(choose(kind, rows, dtype=torch.float16), HopperW4Launch)
    for rows, row_tile in ((17, 32), (32, 32), (least, 64), (least + 1, 128), (most, 128)):
        launch = choose(kind, rows, format=W4Format("affine", 32))
        assert isinstance(launch, HopperW4Launch)
        assert launch.row_tile == row_tile
    for group, most_of_8_bits in HOPPER_ROWS_OF_8_BITS.items():
        for rows in (least, least + 1, most_of_8_bits, most_of_8_bits + 1):
            launch = choose(kind, rows, format=W4Format("affine in 8 bits", group))
            assert isinstance(launch, HopperW4Launch) == (least < rows <= most_of_8_bits)
    assert choose(kind, least) == of_table(kind, least)
    nvfp4, in_groups = W4Format("nvfp4", 16), W4Format("integer", 32)
    for format in (nvfp4, in_groups, GROUP_128, W4Format("affine", 32)):
        is_narrow = kind != "gated" and format not in (nvfp4, in_groups)
        assert (choose(kind, 1, format=format) == of_table(kind, 1)) != is_narrow
    assert choose(kind, 4096) is None, "the library multiplies many rows"
    narrow = W4Format("affine", 16)
    formats = [{"format": one} for one in (W4Format("integer", 64), GROUP_128.for_rows(6160), narrow)]
    for other in ({"dtype": torch.float32}, *formats):
        assert choose(kind, most, **other) == of_table(kind, most)


@pytest.mark.parametrize("format", [W4Format("affine", 32), W4Format("affine in 8 bits", 16)], ids=str)
@pytest.mark.parametrize("kind", HOPPER_ROWS)
def test_launches_fit(kind: Kind, format: W4Format) -> None:
    for rows in (33, 65, 200, 256, 500, 1024):
        for out_features, in_features in ((6144, 4096), (4096, 12288), (512, 128), (1024, 3072), (24576, 384)):
            shape = rows, out_features, in_features
            launch = hopper_w4.choose_hopper_w4_launch(kind, *shape, format, torch.device("cuda"))
            out_bytes = 4 if launch.num_parts > 1 else 2
            assert hopper_w4.num_stages(launch, format, out_bytes, is_gated=kind == "gated") >= 2
            assert 1 <= launch.num_parts <= max(1, in_features // 256)
            assert launch.num_parts == 1 or kind != "gated"


def test_an_lm_head_takes_hoppers_kernel_for_more_rows() -> None:
    for format in (GROUP_128, W4Format("affine in 8 bits", 16)):
        of_head = [choose("plain", rows, format=format, out_features=152064) for rows in (64, 1024, 1025)]
        assert [isinstance(launch, HopperW4Launch) for launch in of_head] == [False, True, False]


def test_as_few_rounds_as_possible() -> None:
    """With 256 rows 128 programs multiply the gate and up projection of an 8B model at the same time."""
    launch = hopper_w4.choose_hopper_w4_launch("gated", 256, 12288, 4096, GROUP_128, torch.device("cuda"))
    assert launch == HopperW4Launch(128, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts(dtype: torch.dtype) -> None:
    """Experts with many rows take Hopper's kernel: MXFP4 with bfloat16 alone."""
    format = W4Format("mxfp4", 32)
    gate_up, down = (
        ExpertMatrix(torch.empty(4, rows, 32, dtype=torch.int16), None, torch.empty(4, 1, rows), format)
        for rows in (128, 64)
    )
    x = torch.empty(1, 64, dtype=dtype)
    for rows in (HOPPER_EXPERT_ROWS, HOPPER_EXPERT_ROWS + 1, 8192):
        launch = expert_launches.choose_expert_launch(
            rows, gate_up, down, x, ExpertActivation(), quantises=False, batch_invariant=False
        )
        has_many = rows > HOPPER_EXPERT_ROWS and dtype == torch.bfloat16
        assert isinstance(launch, HopperW4Launch) == has_many
