"""DenseModules: the linear layers through which pooled hidden states go before they are embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.core.task_config import DenseActivation, DenseModule
from nvcli.errors import LoadError
from nvcli.models.checkpoint import read_tensors
from nvcli.models.stored_values import OpenFiles, reading

_ACTIVATIONS: Mapping[DenseActivation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"identity": torch.Tensor.contiguous, "tanh": torch.tanh, "relu": F.relu, "gelu": F.gelu}
)


class _Layer(NamedTuple):
    weight: Tensor
    """[out, in] float32"""
    bias: Tensor | None
    """[out] float32"""
    activation: Callable[[Tensor], Tensor]


class DenseModules:
    """The layers, whole on this rank, in float32 as sentence-transformers computes them."""

    def __init__(self, modules: Sequence[DenseModule], device: torch.device, *, is_random: bool) -> None:
        """Read their weights, or make them up (`is_random`). Raises LoadError."""
        self._layers = [_random(module, device) if is_random else _read(module, device) for module in modules]

    def apply(self, pooled: Tensor) -> Tensor:
        """Return the embeddings [n, out] of pooled states [n, in], both in float32."""
        for weight, bias, activation in self._layers:
            pooled = activation(F.linear(pooled, weight, bias))
        return pooled


def _shapes(module: DenseModule) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a module's tensors, by their names."""
    bias = {"linear.bias": (module.out_size,)} if module.has_bias else {}
    return {"linear.weight": (module.out_size, module.in_size), **bias}


def _read(module: DenseModule, device: torch.device) -> _Layer:
    tensors, found = read_tensors(module.folder), {}
    with OpenFiles() as files:
        for name, shape in _shapes(module).items():
            info = tensors.get(name)
            if info is None or info.shape != shape:
                what = "missing" if info is None else f"of the shape {list(info.shape)}"
                raise LoadError(
                    f"{module.folder}: tensor {name} is {what}, and config.json there asks for {list(shape)}; download "
                    "the folder again"
                )
            with reading(info.file):
                values = files.read(info, tuple(slice(0, size) for size in shape), device)
            found[name] = values.to(device, torch.float32, copy=True)
    return _Layer(found["linear.weight"], found.get("linear.bias"), _ACTIVATIONS[module.activation])


def _random(module: DenseModule, device: torch.device) -> _Layer:
    weight = torch.randn(module.out_size, module.in_size, device=device) * module.in_size**-0.5
    bias = torch.zeros(module.out_size, device=device) if module.has_bias else None
    return _Layer(weight, bias, _ACTIVATIONS[module.activation])
