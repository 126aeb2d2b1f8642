"""A model's first start on a machine: finds the kernels to compile, and compiles them side by side
(`compiled_programs.py` tells whether it is the first).

Otherwise the warm-up would compile one kernel after another. Here the warm-up's steps run with their launches skipped
(`kernels/triton/launch/compile_ahead.py`). The outputs that the kernels would write are zero meanwhile, so that torch's
operations find no index out of range. Several ranks do so together, each on its share of the cores: they make the same
steps, so that those of their collectives that are not kernels of ours meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvcli.core.engine_config import EngineConfig
from nvcli.core.system.host_memory import available_ram
from nvcli.errors import NvcliError, first_line
from nvcli.kernels.triton.launch.compile_processes import CompileProcesses
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from nvcli.worker.runner.compiled_programs import Program
from nvcli.worker.runner.device import own_cores

_MOST_PROCESSES = 32
"""A model has hardly more kernels than this."""
_PROCESS_BYTES = 512 << 20
"""Memory per process: compiling the largest kernel takes 113 MiB, and the assembler as much again or more."""


def due_program(config: EngineConfig, device: torch.device, world: TensorParallelGroup) -> Program | None:
    """Return the program whose kernels all ranks of `world` compile now, as ranks skip the same launches or none; None:
    they were compiled before, or are not compiled side by side."""
    program = Program.of(config)
    is_due = program is not None and not program.was_compiled(_gpu(device)) and program.takes_notes()
    return program if world.min(int(is_due)) else None


def note_compiled(program: Program, device: torch.device) -> None:
    """Note in the cache that a program's kernels are compiled for this GPU."""
    program.note_compiled(_gpu(device))


def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def compile_kernels(processes: CompileProcesses, device: torch.device, run: Callable[[], None]) -> str | None:
    """Compile the kernels that `run` launches. If `run` fails without its launches, return a note for the user; missing
    kernels are then compiled at their first launch.

    Raises Triton's error if a kernel cannot be compiled, and NvcliError as `run` does.
    """
    from nvcli.kernels.triton.launch.compile_ahead import compile_ahead

    most = max(2, min(_MOST_PROCESSES, own_cores(device), available_ram() // _PROCESS_BYTES))
    with compile_ahead(processes, device, most=most):
        try:
            with _ZeroedMemory():  # type: ignore[no-untyped-call]
                run()
        except NvcliError:
            raise
        except Exception as error:  # anything that a step makes of zeros
            return f"kernels are compiled one after another, as not all were found in advance ({first_line(error)})"
    return None


class _ZeroedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills memory of new uninitialised tensors with zeros."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch first imports its compiler, which takes seconds, just to keep it away from here

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func.overloadpacket in _EMPTY else made


_EMPTY = frozenset(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
)
