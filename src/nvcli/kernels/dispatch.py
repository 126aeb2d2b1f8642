"""`with_kernel`: lets CUDA tensors take the Triton kernel that is held to a function of plain torch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_import = functools.cache(importlib.import_module)
"""A step without a graph comes here for each layer, where `import_module` alone takes as long as a launch."""


def with_kernel(module: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let calls with CUDA tensors go to the function of the same name and parameters in `nvcli.kernels.triton`.

    `module` is its module there, which is imported with the first such call. The first tensor among the positional
    arguments, or the first field of a tuple among them, says where the tensors are.
    """
    name = f"nvcli.kernels.triton.{module}"

    def decorate(reference: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(reference)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            function = reference
            for value in args:
                first = value[0] if isinstance(value, tuple) else value
                if isinstance(first, Tensor):
                    if first.is_cuda:
                        function = getattr(_import(name), reference.__name__)
                    break
            return function(*args, **kwargs)

        return run

    return decorate
