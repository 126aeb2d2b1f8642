"""The parts that vision towers are made of: projections and norms that every rank holds whole, and activations.

Shapes: P patches, or tokens, of some size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvcli.models.parallel import BuildContext, TensorShards
from nvcli.models.weights import WeightModule, WeightSource, empty_parameter, stacked_rows


class Weights(TensorShards):
    """A weight, and a bias where the tower has one."""

    bias: nn.Parameter | None

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__(build, {"weight": f"{name}.weight", "bias": f"{name}.bias"})


class Linear(WeightModule):
    """Projections of one input, multiplied as one: [P, in] → [P, all their outputs]."""

    bias: nn.Parameter | None

    def __init__(self, build: BuildContext, *names: str) -> None:
        super().__init__()
        self.weights = [build.tensors[f"{name}.weight"] for name in names]
        self.biases = [build.tensors[f"{name}.bias"] for name in names if f"{name}.bias" in build.tensors]
        first, *_ = self.weights
        rows = sum(tensor.shape[0] for tensor in self.weights)
        self.weight = empty_parameter(first, rows, *first.shape[1:])
        self.register_parameter("bias", empty_parameter(first, rows) if self.biases else None)

    def weight_sources(self) -> Iterator[WeightSource]:
        for parameter, tensors in (("weight", self.weights), ("bias", self.biases)):
            yield from stacked_rows(parameter, [(tensor, tensor.shard(0, 1)) for tensor in tensors])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.flatten(1), self.bias)


class Norm(Weights):
    """A layer norm, or without a bias an RMS norm in float32: [P, H] → [P, H]."""

    def __init__(self, build: BuildContext, name: str, eps: float) -> None:
        super().__init__(build, name)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        values = x.float()
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * values.to(x.dtype)


def activate(x: Tensor, kind: Literal["silu", "gelu", "gelu_tanh"]) -> Tensor:
    """Apply an activation to each number."""
    if kind == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def side_by_side(x: Tensor, count: int, *, by_channel: bool = False) -> Tensor:
    """Put the vectors of each `count` patches side by side: [P, H] → [P / count, count × H]; `by_channel`: the numbers
    of one channel lie beside each other, as in a convolution."""
    squares = x.view(-1, count, x.shape[-1])
    return (squares.transpose(1, 2) if by_channel else squares).flatten(1)
