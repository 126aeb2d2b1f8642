"""Launches products for Hopper where there is no such GPU, and prints what the assembler says of the kernels
(`hopper_compile.py`), and how many of their loops carry nothing from one round to the next: a report and a number for
each launch.

It runs in a process of its own, without Triton's interpreter: `python hopper_products_compile.py KIND`, of `LAUNCH`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hopper_compile import FakeDriver, assemble
from triton.runtime.driver import driver

from compiling_process import run_compiling
from nvcli.kernels.activation import Activation
from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.expert_types import Routes
from nvcli.kernels.fp8_types import FP8, QuantisedRows
from nvcli.kernels.triton.products import hopper_fp8, hopper_fp8_decode, hopper_w4
from nvcli.kernels.triton.products.expert_groups import ITEM_FIELDS, WorkList
from nvcli.kernels.triton.products.product_launch import DecodeLaunch, HopperFP8Launch, HopperW4Launch
from nvcli.kernels.weight_formats import W4Format

ROWS, OUT_FEATURES, IN_FEATURES = 256, 768, 1024


def reports(kind: str) -> list[tuple[str, int]]:
    """Return what is printed of a kind."""
    done = run_compiling(Path(__file__), kind)
    assert done.returncode == 0, done.stderr
    found: list[tuple[str, int]] = json.loads(done.stdout)
    return found


def launch_fp8() -> Iterator[Any]:
    for unit_tiles in (2, None):
        launch = HopperFP8Launch(2, 2, unit_tiles)
        hopper_fp8.gated_linear(*fp8_product(), launch, activation=ExpertActivation())
        yield hopper_fp8.hopper_fp8_kernel
    hopper_fp8.linear(*fp8_product(), HopperFP8Launch(3, 1))
    yield hopper_fp8.hopper_fp8_kernel
    x, weight, scales = fp8_product()
    experts = weight.unflatten(0, (4, -1)), scales.unflatten(0, (4, -1))
    pairs = torch.zeros(ROWS, dtype=torch.int32)
    routes = Routes(pairs.view(-1, 2), torch.zeros(ROWS // 2, 2))
    grouped = hopper_fp8.Grouped(WorkList(pairs, torch.zeros(6, ITEM_FIELDS.value, dtype=torch.int32), 128), routes)
    out = torch.zeros(2, ROWS // 2, OUT_FEATURES // 4, dtype=torch.bfloat16)
    gated = weight.unflatten(0, (3, -1)), scales.unflatten(0, (3, -1))
    clamped = ExpertActivation(kind="clamped_swiglu", alpha=1.702, limit=7.0, offset=1.0)
    biases = torch.zeros(OUT_FEATURES, dtype=torch.bfloat16)
    for bias in (None, biases):
        hopper_fp8.linear(x, *experts, HopperFP8Launch(2, 2, 2), out, grouped, bias)
        yield hopper_fp8.hopper_fp8_kernel
    without_bias = (ExpertActivation(), None), (ExpertActivation(kind="clamped_silu", limit=7.0), None)
    for activation, bias in (*without_bias, (clamped, biases)):
        hopper_fp8.gated_linear(x, *gated, HopperFP8Launch(2, 2, 2), grouped, bias, activation=activation)
        yield hopper_fp8.hopper_fp8_kernel


def launch_fp8_decode() -> Iterator[Any]:
    for launch in (DecodeLaunch(256), DecodeLaunch(256, num_parts=2)):
        hopper_fp8_decode.linear(*fp8_product(), launch)
        yield hopper_fp8_decode.hopper_fp8_decode_kernel


def launch_w4() -> Iterator[Any]:
    x = torch.zeros(ROWS, IN_FEATURES, dtype=torch.bfloat16)
    gates: list[tuple[Activation | None, int]] = [(None, 2), ("silu", 3)]
    formats = [*product((W4Format("integer", 128), W4Format("affine", 32)), gates)]
    for format, (gate, blocks) in (*formats, (W4Format("affine in 8 bits", 16), gates[1])):
        words = torch.zeros(OUT_FEATURES, format.words_of_row(IN_FEATURES), dtype=torch.int16)
        scales = torch.zeros(IN_FEATURES // format.group, OUT_FEATURES, dtype=torch.int32)
        hopper_w4.linear(x, words, scales, format, HopperW4Launch(128, blocks), gate=gate)
        yield hopper_w4.hopper_w4_kernel


def fp8_product() -> tuple[QuantisedRows, torch.Tensor, torch.Tensor]:
    x = QuantisedRows(torch.zeros(ROWS, IN_FEATURES, dtype=FP8), torch.zeros(ROWS), torch.bfloat16)
    return x, torch.zeros(OUT_FEATURES, IN_FEATURES, dtype=FP8), torch.zeros(OUT_FEATURES)


LAUNCH = {"fp8": launch_fp8, "fp8_decode": launch_fp8_decode, "w4": launch_w4}


def compile_all(kind: str) -> Iterator[tuple[str, int]]:
    driver.set_active(FakeDriver())
    with patch.multiple(f"nvcli.kernels.triton.products.hopper_{kind}", num_multiprocessors=lambda device: 132):
        for kernel in LAUNCH[kind]():
            (compiled,) = kernel.device_caches[0][0].values()
            loops = [line for line in compiled.asm["ttgir"].splitlines() if "scf.for" in line]
            yield assemble(kernel), sum("iter_args" not in line for line in loops)
            kernel.device_caches.clear()


if __name__ == "__main__":
    print(json.dumps(list(compile_all(sys.argv[1]))))
