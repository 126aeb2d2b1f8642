"""Functions of plain torch and the kernels that CUDA tensors take in their place are called alike."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nvcli import kernels
from nvcli.kernels.dispatch import with_kernel

MODULES = [importlib.import_module(f"nvcli.kernels.{found.name}") for found in pkgutil.iter_modules(kernels.__path__)]
FUNCTIONS = {
    f"{function.__module__}.{name}": function
    for module in MODULES
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if hasattr(function, "__wrapped__") and function.__module__ == module.__name__
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_kernel_has_the_parameters_of_its_reference(function: Callable[..., Any]) -> None:
    module = inspect.getclosurevars(function).nonlocals["name"]
    kernel = getattr(importlib.import_module(module), function.__name__)
    wanted, found = (inspect.signature(one).parameters.values() for one in (function, kernel))
    assert [(one.name, one.kind, one.default) for one in found] == [(one.name, one.kind, one.default) for one in wanted]


class OnGPU(torch.Tensor):
    is_cuda = True


def test_the_first_tensor_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvcli.kernels.triton.elementwise import norm

    @with_kernel("elementwise.norm")
    def rms_norm(*values: Any, eps: float = 0.0) -> object:
        return "reference"

    monkeypatch.setattr(norm, "rms_norm", lambda *values, eps: ("kernel", eps))
    here, there = torch.ones(2), torch.ones(2).as_subclass(OnGPU)
    assert rms_norm(here, eps=1.0) == rms_norm((here,), there) == "reference"
    assert rms_norm(there, eps=1.0) == rms_norm(None, (there, here), here, eps=1.0) == ("kernel", 1.0)
