"""Compiles the kernel that activates and quantises rows where there is no GPU, and prints what the assembler makes of
it: registers, and instructions for each number of a row.

It runs in a process of its own, without Triton's interpreter: `python fp8_compile.py SIZE`, for bfloat16.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from hopper_compile import FakeDriver
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.driver import driver

from nvcli.kernels.triton.elementwise import fp8


class OnGPU(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def assemble(size: int) -> dict[str, float]:
    driver.set_active(FakeDriver())
    gate_up = torch.zeros(2, 2 * size, dtype=torch.bfloat16).as_subclass(OnGPU)
    fp8.activate_and_quantise(gate_up, "silu", "channel")
    (kernel,) = fp8._quantise_kernel.device_caches[0][0].values()
    ptxas, nvdisasm = get_ptxas(90).path, knobs.nvidia.nvdisasm.path
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(kernel.asm["ptx"])
        command = [ptxas, "-v", "--gpu-name=sm_90a", source, "-o", binary]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        code = subprocess.run([nvdisasm, "-c", binary], capture_output=True, text=True, check=True).stdout
    (registers,) = re.findall(r"Used (\d+) registers", report)
    instructions = len(re.findall(r"/\*[0-9a-f]{4}\*/ +(?!NOP)\S", code))
    threads = 32 * kernel.metadata.num_warps
    return {"registers": int(registers), "threads": threads, "instructions": instructions * threads / size}


if __name__ == "__main__":
    print(json.dumps(assemble(int(sys.argv[1]))))
