"""Launches FP8 products of the rows of a decode step for Hopper where there is no such GPU, and prints what the
assembler says of the kernel (`hopper_compile.py`), and how many of its loops carry nothing from one round to the next:
one report and one number for each launch.

It runs in a process of its own, without Triton's interpreter.
"""

from __future__ import annotations

import json

import torch
from hopper_compile import FakeDriver, assemble
from triton.runtime.driver import driver

from nvcli.kernels.fp8_types import FP8, QuantisedRows
from nvcli.kernels.triton import hopper_fp8_decode
from nvcli.kernels.triton.fp8_launches import DecodeLaunch
from nvcli.kernels.triton.hopper_fp8_decode_kernel import hopper_fp8_decode_kernel

ROWS, OUT_FEATURES, IN_FEATURES = 8, 1024, 512

if __name__ == "__main__":
    driver.set_active(FakeDriver())
    hopper_fp8_decode.num_multiprocessors = lambda device: 132  # type: ignore[assignment]
    x = QuantisedRows(torch.zeros(ROWS, IN_FEATURES).to(FP8), torch.zeros(ROWS), torch.bfloat16)
    weight, scales = torch.zeros(OUT_FEATURES, IN_FEATURES).to(FP8), torch.zeros(OUT_FEATURES)
    reports = []
    for launch in (DecodeLaunch(256), DecodeLaunch(256, num_parts=2)):
        hopper_fp8_decode.linear(x, weight, scales, launch)
        (kernel,) = hopper_fp8_decode_kernel.device_caches[0][0].values()
        loops = [line for line in kernel.asm["ttgir"].splitlines() if "scf.for" in line]
        reports.append((assemble(hopper_fp8_decode_kernel), sum("iter_args" not in line for line in loops)))
        hopper_fp8_decode_kernel.device_caches.clear()
    print(json.dumps(reports))
