"""Launches products with weights of 4 bits for Hopper where there is no such GPU, and prints what the assembler says of
the kernels (`hopper_compile.py`): one report for each launch.

It runs in a process of its own, without Triton's interpreter.
"""

from __future__ import annotations

import json

import torch
from hopper_compile import FakeDriver, assemble
from triton.runtime.driver import driver

from nvcli.kernels.triton import hopper_w4
from nvcli.kernels.triton.hopper_w4 import HopperLaunch
from nvcli.kernels.triton.hopper_w4_kernel import hopper_w4_kernel
from nvcli.kernels.weight_formats import W4Format

ROWS, OUT_FEATURES, IN_FEATURES = 8, 768, 256

if __name__ == "__main__":
    driver.set_active(FakeDriver())
    hopper_w4.num_multiprocessors = lambda device: 132  # type: ignore[assignment]
    x = torch.zeros(ROWS, IN_FEATURES, dtype=torch.bfloat16)
    words = torch.zeros(OUT_FEATURES, IN_FEATURES // 4, dtype=torch.int16)
    scales = torch.zeros(IN_FEATURES // 128, OUT_FEATURES, dtype=torch.int32)
    reports = []
    for product, blocks in ((hopper_w4.linear, 2), (hopper_w4.gated_linear, 3)):
        product(x, words, scales, W4Format("integer", 128), HopperLaunch(128, blocks))  # type: ignore[operator]
        reports.append(assemble(hopper_w4_kernel))
        hopper_w4_kernel.device_caches.clear()
    print(json.dumps(reports))
