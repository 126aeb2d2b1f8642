"""Compiles kernels ahead for a GPU that is not there, with a driver that notes launches (`hopper_compile.py`), and
prints what was launched when, as JSON.

It runs in a process of its own, without Triton's interpreter, and with a cache on disk of its own.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import torch
import triton
import triton.language as tl
from hopper_compile import FakeDriver
from triton import knobs
from triton.runtime.cache import triton_key
from triton.runtime.driver import driver

from nvcli.kernels.fp8_types import FP8, QuantisedRows
from nvcli.kernels.triton.launch import compile_ahead
from nvcli.kernels.triton.launch.compile_processes import CompileProcesses, hash_triton
from nvcli.kernels.triton.products import hopper_fp8, hopper_fp8_kernel
from nvcli.kernels.triton.products.product_launch import HopperFP8Launch


@triton.jit
def fill(out_ptr, VALUE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out_ptr, VALUE)


@triton.jit
def broken(out_ptr):  # type: ignore[no-untyped-def]
    tl.static_assert(False)


def launch_all(numbers: torch.Tensor) -> None:
    for value in (1, 2, 1):
        fill[(1,)](numbers, value)
    codes, scales = torch.zeros(256, 256, dtype=FP8), torch.zeros(256)
    hopper_fp8.linear(QuantisedRows(codes, scales, torch.bfloat16), codes, scales, HopperFP8Launch(2, 1))


def main() -> dict[str, Any]:
    active = FakeDriver()
    driver.set_active(active)
    knobs.runtime.launch_enter_hook.add(lambda metadata: None)
    hopper_fp8.num_multiprocessors = lambda device: 132  # type: ignore[assignment]
    numbers = torch.zeros(4)
    hash_triton()
    found: dict[str, Any] = {"hashes": triton_key.cache_info().currsize}
    compiled: list[tuple[str, str, bool]] = []
    processes = CompileProcesses()
    devices: list[tuple[str, torch.device]] = []
    device = torch.device("cuda", 1)
    torch.cuda.set_device = lambda device: devices.append((threading.current_thread().name.split("_")[0], device))

    def note(*, src: Any, cache_hit: bool, **others: object) -> None:
        compiled.append((threading.current_thread().name.split("_")[0], src.name, cache_hit))

    knobs.compilation.listener = note
    with compile_ahead.compile_ahead(processes, device, most=2):
        launch_all(numbers)
    found["launched_ahead"], found["devices"] = len(active.launches), [[name, str(one)] for name, one in set(devices)]
    found["compiled_ahead"] = sorted(compiled)
    launch_all(numbers)
    launch_all(numbers)
    found["launched"], found["compiled_later"] = len(active.launches), len(compiled) - len(found["compiled_ahead"])

    try:
        with compile_ahead.compile_ahead(processes, device, most=2):
            broken[(1,)](numbers)
    except triton.CompilationError as error:
        found["error"] = type(error).__name__

    # A thread that fails for a reason of its own.
    compiled.clear()
    submit = compile_ahead.ThreadPoolExecutor.submit

    def fail() -> None:
        raise OSError("no thread")

    compile_ahead.ThreadPoolExecutor.submit = lambda self, *work: submit(self, fail)  # type: ignore[assignment, method-assign]
    with compile_ahead.compile_ahead(processes, device, most=2):
        fill[(1,)](numbers, 3)
    fill[(1,)](numbers, 3)
    found["launched_after_failure"], found["after_failure"] = len(active.launches), [*compiled]
    compile_ahead.ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]

    # What is in the cache on disk needs no process.
    processes.close()
    processes.compile = fail  # type: ignore[method-assign, assignment]
    compiled.clear()
    hopper_fp8._kernel.cache_clear()
    hopper_fp8_kernel.hopper_fp8_kernel.device_caches.clear()
    with compile_ahead.compile_ahead(processes, device, most=2):
        launch_all(numbers)
    found["compiled_again"] = compiled
    return found


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
