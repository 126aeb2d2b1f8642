"""A driver for Triton that launches nothing, as on a Hopper GPU that is not there, and what the assembler says of the
kernels that were compiled for it. Scripts that use it run in processes of their own, without Triton's interpreter."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas


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
        self.early: list[bool] = []
        """Whether each may begin before the one before has ended."""

    def forget_launch(self) -> list[object]:
        """Take back the note of the last launch, and return it."""
        self.early.pop()
        return self.launches.pop()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, src: object, metadata: Any) -> object:
        def launch(x: int, y: int, z: int, *args: Any) -> None:
            # Before the kernel's arguments: stream, function, two of metadata, two hooks.
            launch_metadata, enter_hook, exit_hook = args[3:6]
            enter_hook(launch_metadata)
            self.launches.append([x, y, z, *map(described, args[6:])])
            self.early.append(metadata.launch_pdl)
            exit_hook(launch_metadata)

        return launch


def described(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, tuple):
        return [described(part) for part in argument]
    if hasattr(argument, "base"):
        return [argument.base.data_ptr(), argument.shape, argument.strides, argument.block_shape]
    if hasattr(argument, "__dataclass_fields__"):
        return str(argument)
    return argument


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
