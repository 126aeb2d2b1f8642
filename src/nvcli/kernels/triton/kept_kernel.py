"""KeptKernel: a kernel that keeps what Triton compiled for its arguments.

Triton looks at every argument of each launch to find what it compiled for their kind. Where a launch must cost the host
little, and all its arguments are of one kind, that is kept instead. Triton's own ways in are used: `kernel.warmup`
compiles, and the compiled kernel launches itself, with the hooks that are set.
"""

from __future__ import annotations

from typing import Any

from triton.compiler import CompiledKernel

from nvcli.kernels.triton.compile_ahead import Placeholder

_NUM_WARPS = 4


class KeptKernel:
    """A kernel of four warps for arguments of one kind. Between launches only numbers and addresses differ, and those
    that are multiples of 16 stay such."""

    def __init__(self, kernel: Any, constants: tuple[object, ...]) -> None:
        """`constants` are the kernel's last arguments."""
        self._kernel = kernel
        self._constants = constants
        self._compiled: CompiledKernel | None = None

    def launch(self, num_programs: int, *arguments: object) -> None:
        """Launch so many programs, with the arguments before the constants."""
        grid = (num_programs, 1, 1)
        compiled = self._compiled
        if compiled is None:
            compiled = self._kernel.warmup(*arguments, *self._constants, grid=grid, num_warps=_NUM_WARPS)
            if not isinstance(compiled, Placeholder):
                self._compiled = compiled
        compiled[grid](*arguments, *self._constants)
