"""Launches the prefill kernel for Hopper where there is no such GPU, by a driver that launches nothing, and prints what
was launched, what Triton would have launched, and what the assembler says of the kernel.

It runs in a process of its own, without Triton's interpreter: `python hopper_compile.py HEAD_DIM GROUP SOFT_CAP`, for
bfloat16, 8 KV heads and blocks of 64 tokens, with sinks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from attention_shapes import attention_shape
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.driver import driver

from nvcli.kernels.triton import hopper_launch
from nvcli.kernels.triton.attention_launch import LayerInputs
from nvcli.kernels.triton.hopper_prefill_kernel import hopper_prefill_kernel
from nvcli.kernels.triton.kept_kernel import KeptKernel
from nvcli.kernels.triton.prefill_attention import PrefillAttention, PrefillKind
from nvcli.kernels.triton.prefill_tiles import TilePart

KV_HEADS, BLOCK_SIZE = 8, 64


class FakeUtils:
    def load_binary(self, *args: object) -> tuple[int, ...]:
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}


class FakeDriver:
    """What Triton asks of a driver, on a GPU that notes launches: the programs and the arguments of each. Hooks that
    are set are called."""

    utils = FakeUtils()

    def __init__(self) -> None:
        self.launches: list[list[object]] = []

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, src: object, metadata: object) -> object:
        def launch(x: int, y: int, z: int, *args: Any) -> None:
            # Before the kernel's arguments: stream, function, two of metadata, two hooks.
            launch_metadata, enter_hook, exit_hook = args[3:6]
            enter_hook(launch_metadata)
            self.launches.append([x, y, z, *map(described, args[6:])])
            exit_hook(launch_metadata)

        return launch


def described(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if hasattr(argument, "base"):
        return [argument.base.data_ptr(), argument.shape, argument.strides, argument.block_shape]
    return argument


class ThroughTriton:
    """A kernel of which nothing is kept: Triton looks for what it compiled."""

    def __init__(self, kernel: Any, constants: tuple[object, ...]) -> None:
        self._kernel, self._constants = kernel, constants

    def launch(self, num_programs: int, *arguments: object) -> None:
        self._kernel[(num_programs, 1, 1)](*arguments, *self._constants, num_warps=4)


def make_attention(head_dim: int, group: int) -> PrefillAttention:
    with patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(multi_processor_count=132)):
        cuda = torch.device("cuda")
        shape = attention_shape(num_heads=KV_HEADS * group, num_kv_heads=KV_HEADS, head_dim=head_dim, device=cuda)
        return PrefillAttention(shape, PrefillKind.HOPPER)


def launch(head_dim: int, group: int, soft_cap: float) -> dict[str, list[Any]]:
    """Launch for two layers, once more for the first with other queries, for a smaller cache in the place of the
    first, for one elsewhere, and for a prefix that chunks share; then all that through Triton. Return both, and the
    names that a hook was told."""
    active = FakeDriver()
    driver.set_active(active)
    pool = torch.zeros(3, 2, 3, BLOCK_SIZE, KV_HEADS, head_dim, dtype=torch.bfloat16)
    tables, tiles = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(10, 8, dtype=torch.int32)
    num_tiles = torch.zeros(1, dtype=torch.int32)
    planned: Any = SimpleNamespace(capacity=10, items=tiles, num_items=num_tiles, part=TilePart.WHOLE)
    prefixes: Any = SimpleNamespace(capacity=10, items=tiles, num_items=num_tiles, part=TilePart.PREFIX)
    log_sums = torch.zeros(20 * KV_HEADS * group)
    queries = torch.zeros(2, 20, KV_HEADS * group, head_dim, dtype=torch.bfloat16)
    out, sinks = torch.zeros_like(queries[0]), torch.zeros(KV_HEADS * group)
    names: list[str] = []
    knobs.runtime.launch_enter_hook.add(lambda metadata: names.append(metadata.get()["name"]))
    for kept in (KeptKernel, ThroughTriton):
        hopper_launch.KeptKernel = kept  # type: ignore[assignment, misc]
        attention = make_attention(head_dim, group)
        for layer, number, blocks in ((0, 0, 3), (1, 0, 3), (0, 1, 3), (0, 0, 2), (2, 0, 3)):
            k_cache, v_cache = pool[layer, :, :blocks]
            inputs = LayerInputs(queries[number], k_cache, v_cache, tables, 0.1, None, soft_cap, sinks)
            attention.run(inputs, planned, out)
        attention.run(inputs._replace(q=queries[0], k_cache=pool[0, 0], v_cache=pool[0, 1]), prefixes, out, log_sums)
    half = len(active.launches) // 2
    return {"kept": active.launches[:half], "through_triton": active.launches[half:], "names": names}


def assemble(function: Any) -> str:
    """Return ptxas's report on the kernels that were compiled of a function."""
    ptxas = get_ptxas(90).path  # versions of Triton bring several
    report = ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        for kernel in function.device_caches[0][0].values():
            path.write_text(kernel.asm["ptx"])
            command = [ptxas, "-v", "--gpu-name=sm_90a", path, "-o", path.with_suffix(".cubin")]
            report += subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return report


if __name__ == "__main__":
    launched = launch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    print(json.dumps(launched | {"report": assemble(hopper_prefill_kernel)}))
