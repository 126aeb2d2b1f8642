"""Which launches products with FP8 weights get, by estimates of their times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nvcli.kernels.fp8 import quantise
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.triton.products import launch_rule
from nvcli.kernels.triton.products.launch_rule import Kind, TorchLaunch, choose_for, count, microseconds, read_launch
from nvcli.kernels.triton.products.product_launch import DecodeLaunch, HopperFP8Launch, ProductLaunch

GPU = torch.device("cuda", 0)
POINTS = Path(__file__).with_name("fp8_launch_points.jsonl")
"""Microseconds on an H200 of shapes that the coefficients were not fitted to."""
ROWS = (1, 16, 64, 256, 1024, 8192)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One like that which was measured."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch_rule, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch_rule, "_bandwidth", lambda device: launch_rule._times().bandwidth)
    monkeypatch.setattr(launch_rule, "has_known_gluon", lambda: True)
    choose_for.cache_clear()
    yield
    choose_for.cache_clear()


def choose(kind: Kind, rows: int, shape: tuple[int, int], **keys: Any) -> Any:
    return choose_for(kind, rows, *shape, GPU, is_whole=rows % 128 == 0, **keys)


def test_chosen_launches_are_near_the_fastest() -> None:
    """Of products of all kinds that were held out."""
    losses = []
    for line in map(json.loads, POINTS.read_text().splitlines()):
        us = {read_launch(name): time for name, time in line["us"].items()}
        has_torch = line["kind"] != "block" or TorchLaunch("block") in us
        launch = choose(line["kind"], line["rows"], (line["out"], line["in"]), has_torch=has_torch)
        if launch is None:
            launch = TorchLaunch("block" if line["kind"] == "block" else "exact")
        losses.append(us[launch] / min(us.values()) - 1)
    assert len(losses) >= 40
    losses.sort()
    assert losses[len(losses) // 2] <= 0.01
    assert losses[len(losses) * 9 // 10] <= 0.05
    assert losses[-1] <= 0.2


def test_what_costs_more_takes_longer() -> None:
    launches = {kind: [way[0] for way in launch_rule._times().ways[kind].items()] for kind in ("channel", "block")}
    for kind, some in launches.items():
        for launch in some:
            of = launch_rule._times().ways[kind][launch]
            times = [
                microseconds(count(launch, "channel", rows, out, inner, 132), of)
                for rows, out, inner in ((128, 4096, 4096), (128, 4096, 8192), (128, 16384, 8192), (512, 16384, 8192))
            ]
            assert times == sorted(times)
            slower_memory = microseconds(count(launch, "channel", 128, 16384, 8192, 132), of, 2.0)
            assert slower_memory > times[2]
            assert microseconds(count(launch, "channel", 512, 16384, 8192, 66), of) > times[3]


@pytest.mark.parametrize("kind", ["channel", "sum", "block", "gated"])
@pytest.mark.parametrize("shape", [(6144, 4096), (1280, 8192), (57344, 8192), (2880, 512)])
def test_launches_serve_what_they_are_chosen_for(kind: Kind, shape: tuple[int, int]) -> None:
    for rows in ROWS:
        launch = choose(kind, rows, shape)
        if isinstance(launch, HopperFP8Launch):
            assert launch.unit_tiles is not None, "whole sums are not exact"
            assert (launch.groups, launch.blocks) in ((2, 1), (3, 1), (2, 2))
            assert kind != "block" or (launch.blocks, launch.unit_tiles) == (1, 1)
            assert kind != "gated" or (launch.blocks == 2 and shape[0] % 256 == 0)
        elif kind == "gated":
            assert launch is None
        elif launch is not None:
            assert kind == "sum" or launch.num_parts == 1
            assert kind != "block" or (isinstance(launch, ProductLaunch) and launch.out_tile <= launch.in_tile == 128)
    assert choose("block", 1000, shape, has_torch=False) is not None


def test_few_launches_are_there() -> None:
    """Each is compiled at the first start, and those for sums twice."""
    for kind, ways in launch_rule._times().ways.items():
        own = [launch for launch in ways if not isinstance(launch, TorchLaunch)]
        assert len(own) <= 8, kind
        for launch in own:
            if isinstance(launch, ProductLaunch):
                assert launch.num_stages * (launch.row_tile + launch.out_tile) * launch.in_tile <= 227 << 10


def test_sums_that_leave_multiprocessors_idle_are_cut() -> None:
    assert choose("sum", 64, (2048, 4096)).num_parts > 1
    assert choose("sum", 16, (1024, 3072)).num_parts > 1
    assert choose("sum", 8192, (4096, 4096)) == choose("channel", 8192, (4096, 4096)), "all are busy"


def test_fast_sums() -> None:
    """FP8 units add up more where that is asked for, and never where it is not."""
    assert choose("gated", 8192, (24576, 4096), accumulation="fast") == HopperFP8Launch(2, 2, None)
    assert choose("gated", 8192, (24576, 4096)) == HopperFP8Launch(2, 2, 2)


@pytest.mark.parametrize("kind", ["channel", "sum", "block", "gated"])
def test_kernels_that_cannot_be_used(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of 32 bits, odd shapes and versions of Gluon that were not tried leave out kernels for Hopper."""
    for rows in ROWS:
        assert not isinstance(choose(kind, rows, (4096, 4096), has_16_bits=False), HopperFP8Launch)
        assert not isinstance(choose(kind, rows, (4096, 4100)), HopperFP8Launch | DecodeLaunch)
    monkeypatch.setattr(launch_rule, "has_known_gluon", lambda: False)
    choose_for.cache_clear()
    for rows in (*ROWS, 1000):
        assert not isinstance(choose(kind, rows, (4096, 4096)), HopperFP8Launch | DecodeLaunch)
    if kind in ("channel", "sum"):
        assert choose(kind, 1000, (4096, 4096)) is None, "torch's is far faster than what is left"


def test_gpus_that_were_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    launches = [choose("channel", rows, (4096, 4096)) for rows in (1, 16, 32, 64, 65)]
    assert [None if launch is None else launch.row_tile for launch in launches] == [16, 16, 32, 64, None]
    assert choose("block", 4096, (4096, 4096), has_torch=False).row_tile == 64
    assert choose("gated", 8192, (24576, 4096)) is None


def test_numbers_of_rows_are_few() -> None:
    rounded = [launch_rule.rounded(rows) for rows in range(1, 16385)]
    assert all(rows <= found for rows, found in enumerate(rounded, 1))
    assert all(found < rows * 1.13 + 8 for rows, found in enumerate(rounded[:2048], 1))
    assert len(set(rounded)) < 60
    assert sorted(set(rounded))[-3:] == [4096, 8192, 16384], "between which the warm-up runs steps"


def test_rows_and_weights() -> None:
    """On a CPU, whose interpreter runs kernels in plain Triton alone."""
    weight = torch.zeros(256, 512).to(FP8)
    for rows in (1, 300):
        x = quantise(torch.ones(rows, 512, dtype=torch.bfloat16), "channel")
        assert isinstance(launch_rule.choose("channel", x, weight), ProductLaunch)
        assert launch_rule.choose("gated", x, weight) is None
