"""Launches products of many rows with FP8 weights for Hopper where there is no such GPU, and prints what the assembler
says of the kernels (`hopper_compile.py`): one report for each launch.

It runs in a process of its own, without Triton's interpreter.
"""

from __future__ import annotations

import json

import torch
from hopper_compile import FakeDriver, assemble
from triton.runtime.driver import driver

from nvcli.kernels.fp8_types import FP8, QuantisedRows
from nvcli.kernels.triton import hopper_fp8
from nvcli.kernels.triton.fp8_launches import HopperLaunch
from nvcli.kernels.triton.hopper_fp8_kernel import hopper_fp8_kernel

ROWS, OUT_FEATURES, IN_FEATURES = 256, 768, 1024

if __name__ == "__main__":
    driver.set_active(FakeDriver())
    hopper_fp8.num_multiprocessors = lambda device: 132  # type: ignore[assignment]
    codes = torch.zeros(ROWS, IN_FEATURES, dtype=FP8)
    weight, scales = torch.zeros(OUT_FEATURES, IN_FEATURES, dtype=FP8), torch.zeros(OUT_FEATURES)
    x = QuantisedRows(codes, torch.zeros(ROWS), torch.bfloat16)
    reports = []
    for product, launch in (
        (hopper_fp8.gated_linear, HopperLaunch(2, 2, 2)),
        (hopper_fp8.gated_linear, HopperLaunch(2, 2, None)),
        (hopper_fp8.linear, HopperLaunch(3, 1)),
    ):
        product(x, weight, scales, launch)  # type: ignore[operator]
        reports.append(assemble(hopper_fp8_kernel))
        hopper_fp8_kernel.device_caches.clear()
    print(json.dumps(reports))
