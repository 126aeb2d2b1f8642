"""The parts that vision towers are made of: projections and norms that every rank holds whole, and activations.

Shapes: P patches, or tokens, of some size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvcli.kernels import plain_activation
from nvcli.kernels.activation import ACTIVATE_AND_MUL, activate_and_mul
from nvcli.kernels.bounds import clamp_parts, clamp_to_each
from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.norm import add_rms_norm, rms_norm
from nvcli.kernels.whole_numbers import round_up
from nvcli.models.parallel import BuildContext, TensorShards
from nvcli.models.vision.vision_config import BOUNDS
from nvcli.models.weights import WeightModule, WeightSource, empty_parameter

TowerActivation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu"]


_QUICK = 1.702
"""quick_gelu(x) = x × sigmoid(1.702 x)."""


class Weights(TensorShards):
    """A weight, and a bias where the tower has one."""

    bias: nn.Parameter | None

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__(build, {"weight": f"{name}.weight", "bias": f"{name}.bias"})


class Scale(Weights):
    """Learned factors: [P, H] → [P, H]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Linear(WeightModule):
    """Projections of one input, multiplied as one unless each has bounds, in which case all have as many outputs:
    [P, in] → [P, all their outputs]."""

    bias: nn.Parameter | None
    input_min: nn.Parameter | None

    def __init__(self, build: BuildContext, *names: str, pads_rows: bool = False, pads_columns: bool = False) -> None:
        """`pads_rows`: the outputs of each are padded to what products are fast for; `pads_columns`: the inputs are."""
        super().__init__()
        self.weights = [build.tensors[f"{name}.weight"] for name in names]
        self.biases = [build.tensors[f"{name}.bias"] for name in names if f"{name}.bias" in build.tensors]
        first, *_ = self.weights
        self._sizes = [_padded(tensor.shape[0]) if pads_rows else tensor.shape[0] for tensor in self.weights]
        columns = (_padded(first.shape[1]),) if pads_columns else first.shape[1:]
        self.weight = empty_parameter(first, sum(self._sizes), *columns)
        self.register_parameter("bias", empty_parameter(first, sum(self._sizes)) if self.biases else None)
        self.bounds = {
            bound: [build.tensors[f"{name}.{bound}"] for name in names if f"{name}.{bound}" in build.tensors]
            for bound in BOUNDS
        }
        for bound, tensors in self.bounds.items():
            self.register_parameter(bound, empty_parameter(first, len(tensors)) if tensors else None)

    def weight_sources(self) -> Iterator[WeightSource]:
        ones = [1] * len(self.weights)
        of_bounds = ((name, tensors, ones) for name, tensors in self.bounds.items())
        own = ("weight", self.weights, self._sizes), ("bias", self.biases, self._sizes)
        for parameter, tensors, sizes in (*own, *of_bounds):
            start = 0
            for tensor, size in zip(tensors, sizes, strict=False):
                read = tensor.shard(0, 1)
                write = slice(start, start + tensor.shape[0]), *read[1:]
                yield WeightSource(tensor=tensor, read=read, parameter=parameter, write=write)
                start += size

    def forward(self, x: Tensor) -> Tensor:
        if self.input_min is None:
            return F.linear(x, self.weight.flatten(1), self.bias)
        low, high, least, most = (getattr(self, bound) for bound in BOUNDS)
        out = x.new_empty(len(x), sum(self._sizes))
        parts = torch.split(self.weight, self._sizes), torch.split(out, self._sizes, dim=1)
        for own, weight, part in zip(clamp_to_each(x, low, high), *parts, strict=True):
            torch.mm(own, weight.t(), out=part)
        clamp_parts(out, least, most)
        return out

    def activated(self, x: Tensor, kind: TowerActivation) -> Tensor:
        """Project, and apply an activation to each number, on a GPU within the product where PyTorch can."""
        if kind == "gelu_tanh" and x.is_cuda and self.bias is not None and self.input_min is None:
            return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
        return activate(self(x), kind)


def _padded(size: int) -> int:
    """Return the size of an MLP's middle: where rows are no multiples of 16 bytes, GPUs multiply at half the speed."""
    return size if size % 8 == 0 else round_up(size, 64)


class Norm(Weights):
    """A layer norm, or without a bias an RMS norm: [P, H] → [P, H]."""

    def __init__(self, build: BuildContext, name: str, eps: float) -> None:
        super().__init__(build, name)
        self.eps = eps

    def forward(self, x: Tensor, delta: Tensor | None = None) -> Tensor:
        """Norm `x`, to which `delta` is added in place first."""
        is_centered, bias = self.bias is not None, self.bias
        if delta is None:
            return rms_norm(x, self.weight, self.eps, is_centered=is_centered, bias=bias)
        return add_rms_norm(delta, x, self.weight, self.eps, is_centered=is_centered, bias=bias)


def activate(x: Tensor, kind: TowerActivation) -> Tensor:
    """Apply an activation to each number, and use up `x`."""
    if kind == "gelu_tanh":
        return plain_activation.activate(x, kind)
    if kind == "quick_gelu":
        return F.silu(x.mul_(_QUICK)).div_(_QUICK)
    return F.silu(x) if kind == "silu" else F.gelu(x)


def activate_and_multiply(gate_up: Tensor, kind: TowerActivation, limit: float = 0.0) -> Tensor:
    """Apply an activation to the first half of each row, and multiply with the second half. `limit`:
    `VisionConfig.limit`"""
    if limit:
        return activate_and_mul(gate_up, ExpertActivation(kind="clamped_swiglu", limit=limit))
    if kind == "silu" or kind == "gelu_tanh":
        return ACTIVATE_AND_MUL[kind](gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, kind) * up


def side_by_side(x: Tensor, count: int, *, by_channel: bool = False) -> Tensor:
    """Put the vectors of each `count` patches side by side: [P, H] → [P / count, count × H]; `by_channel`: the numbers
    of one channel lie beside each other, as in a convolution."""
    squares = x.view(-1, count, x.shape[-1])
    return (squares.transpose(1, 2) if by_channel else squares).flatten(1)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) × up(x)): [P, H] → [P, O]."""

    def __init__(
        self, build: BuildContext, path: str, activation: TowerActivation = "silu", limit: float = 0.0
    ) -> None:
        """`limit`: `VisionConfig.limit`."""
        super().__init__()
        self.activation, self.limit = activation, limit
        self.up = Linear(build, f"{path}.gate_proj", f"{path}.up_proj")
        self.down = Linear(build, f"{path}.down_proj")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(activate_and_multiply(self.up(x), self.activation, self.limit))
        return out
