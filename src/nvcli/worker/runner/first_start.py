"""The first start of a model on a machine: the kernels that it compiles are found first, and compiled side by side
(`compiled_programs.py` says which start is the first).

Without this the warm-up compiles one kernel after another. The steps of the warm-up run here with launches left out
(`kernels/triton/launch/compile_ahead.py`). What the kernels would write is zero meanwhile, so that torch's operations
find no index out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nvcli.core.system.host_memory import available_ram
from nvcli.errors import NvcliError, first_line
from nvcli.kernels.triton.launch.compile_processes import CompileProcesses
from nvcli.worker.runner.device import own_cores

_MOST_PROCESSES = 32
"""The kernels of a model are hardly more."""
_PROCESS_BYTES = 512 << 20
"""Room for each: compiling the largest kernel takes 113 MiB, and the assembler as much again or more."""


def compile_kernels(processes: CompileProcesses, device: torch.device, run: Callable[[], None]) -> str | None:
    """Compile the kernels that `run` launches. Return a note for the user where `run` fails without its launches: then
    what is missing is compiled at its first launch.

    Raises what Triton raises where a kernel cannot be compiled, and NvcliError as `run` does.
    """
    from nvcli.kernels.triton.launch.compile_ahead import compile_ahead

    most = max(2, min(_MOST_PROCESSES, own_cores(device), available_ram() // _PROCESS_BYTES))
    with compile_ahead(processes, device, most=most):
        try:
            with _ZeroedMemory():  # type: ignore[no-untyped-call]
                run()
        except NvcliError:
            raise
        except Exception as error:  # whatever a step makes of zeros
            return f"kernels are compiled one after another, as they were not all found ahead ({first_line(error)})"
    return None


class _ZeroedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills new memory with zeros where a tensor is made without values."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler first, which takes seconds, to keep it away from here

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
