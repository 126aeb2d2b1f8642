"""`with_kernel`: lets CUDA tensors take the Triton kernel that is held to a function of plain torch."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def with_kernel(module: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let calls with CUDA tensors go to the function of the same name and parameters in `nvcli.kernels.triton`.

    `module` is its module there, which is imported with the first such call. The first tensor among the positional
    arguments, or the first field of a tuple among them, says where the tensors are.
    """

    def decorate(reference: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(reference)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            values = (value[0] if isinstance(value, tuple) else value for value in args)
            if not next(value for value in values if isinstance(value, Tensor)).is_cuda:
                return reference(*args, **kwargs)
            kernels = importlib.import_module(f"nvcli.kernels.triton.{module}")
            kernel: Callable[P, R] = getattr(kernels, reference.__name__)
            return kernel(*args, **kwargs)

        return run

    return decorate
