"""KeptKernel: a kernel that keeps what Triton compiled for its arguments.

Triton inspects every argument of each launch to find the compiled kernel for their kind. Where a launch must cost the
host little and its arguments are always of one kind, the compiled kernel is kept instead. This uses Triton's own
interface: `kernel.warmup` compiles, and the compiled kernel launches itself, with the hooks that are set.
"""

from __future__ import annotations

from typing import Any

from triton.compiler import CompiledKernel

from nvcli.kernels.triton.launch.compile_ahead import Placeholder


class KeptKernel:
    """A kernel for arguments of one kind. Between launches only numbers and addresses differ, and those that are
    multiples of 16 stay such."""

    def __init__(self, kernel: Any, constants: tuple[object, ...], **options: object) -> None:
        """`constants` are the kernel's last arguments; `options`: how Triton launches it."""
        self._kernel = kernel
        self._constants = constants
        self._options = {"num_warps": 4, **options}
        self._compiled: CompiledKernel | None = None

    def launch(self, grid: int | tuple[int, ...], *arguments: object) -> None:
        """Launch a grid of programs, or this many, with the arguments before the constants."""
        sizes = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
        compiled = self._compiled
        if compiled is None:
            compiled = self._kernel.warmup(*arguments, *self._constants, grid=sizes, **self._options)
            if compiled is None:  # in the interpreter
                self._kernel[sizes](*arguments, *self._constants)
                return
            if not isinstance(compiled, Placeholder):
                self._compiled = compiled
        compiled[sizes](*arguments, *self._constants)
