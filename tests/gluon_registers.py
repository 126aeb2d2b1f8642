"""Simulates a Gluon kernel that reads bits as other numbers: what has 16 bits on a GPU has 16 bits here."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gluon_simulator import Simulator

_MAKERS = ("load", "arange", "full", "zeros", "minimum", "maximum", "where")
"""Functions of Gluon that return tensors."""


class Block(Tensor):
    """A tensor with the methods that Gluon's tensors have."""

    type = types.SimpleNamespace(layout="layout")

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tensor:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)


def block(data: Any) -> Tensor:
    return torch.as_tensor(data).as_subclass(Block)


class RegisterSimulator(Simulator):
    """A simulator whose tensors are blocks."""

    def __init__(self, module: types.ModuleType, *, functions: dict[str, Callable[..., Any]]) -> None:
        own = {"barrier": lambda: None, "mma_v2": lambda a, b, c: c + a.float() @ b.float()}
        super().__init__(module, functions=own | functions)

    def _language(self) -> Any:
        language = super()._language()
        for name in _MAKERS:
            setattr(language, name, _of_blocks(getattr(language, name)))
        vars(language).update(
            int1=torch.bool, float16=torch.float16, bfloat16=torch.bfloat16, pointer_type=lambda dtype: dtype,
            join=lambda a, b: torch.stack((a, b), dim=-1), multiple_of=lambda x, size: x,
        )  # fmt: skip
        return language


def _of_blocks(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **options: block(make(*args, **options))
