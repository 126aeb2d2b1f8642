"""W4LinearMethod: linear layers whose weights ranks keep in the 4 bits of a checkpoint (`kernels/w4.py`).

If the checkpoint grouped columns by importance (act-order), the columns of a weight are kept group by group, and
activations are reordered to match before they are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nvcli.kernels.activation import Activation
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.w4 import w4_gated_linear, w4_linear, w4_linear_for_sum
from nvcli.kernels.weight_formats import FP8Scaling, W4Format
from nvcli.models.parallel import LinearMethod, PlainLinearMethod, ShardedLinear
from nvcli.models.weights import WeightSource, empty_parameter, empty_w4, length


class W4LinearMethod(PlainLinearMethod):
    """Words [rows, columns / 4] int16 in whole tiles, and scales [groups, rows] int32."""

    def __init__(self, format: W4Format, *, has_order: bool) -> None:
        self.format = format
        self.has_order = has_order

    def create(self, layer: ShardedLinear) -> None:
        rows, columns = sum(length(piece.rows) for piece in layer.pieces), length(layer.pieces[0].columns)
        layer.weight, layer.weight_scale = empty_w4((rows, columns), self.format)
        if self.has_order:
            order = torch.empty(len(layer.pieces), columns, dtype=torch.int32)
            layer.column_order = nn.Parameter(order, requires_grad=False)
        bias = layer.pieces[0].bias
        layer.bias = None if bias is None else empty_parameter(bias, rows)

    def sources(self, layer: ShardedLinear) -> Iterator[WeightSource]:
        weights = 0
        for source in super().sources(layer):
            if source.parameter != "weight":
                yield source
                continue
            yield source.in_w4("weight_scale", self.format, weights if self.has_order else None)
            weights += 1

    def weight_problem(self, layer: ShardedLinear) -> str | None:
        if not self.has_order or (layer.column_order == layer.column_order[0]).all():
            return None
        names = ", ".join(piece.weight.name for piece in layer.pieces)
        return (
            f"tensors {names} are multiplied together in 4 bits, but group their columns differently: use "
            "quantization: none"
        )

    def apply(self, layer: ShardedLinear, x: Activations, *, with_bias: bool, out: Tensor | None = None) -> Tensor:
        bias = layer.bias if with_bias else None
        return w4_linear(self._inputs(layer, x), layer.weight, layer.weight_scale, self.format, bias, out)

    def apply_gated(
        self, layer: ShardedLinear, x: Activations, activation: Activation, scaling: FP8Scaling | None = None
    ) -> Activations:
        if layer.bias is not None:
            return LinearMethod.apply_gated(self, layer, x, activation)
        return w4_gated_linear(self._inputs(layer, x), layer.weight, layer.weight_scale, self.format, activation)

    def apply_for_sum(self, layer: ShardedLinear, x: Activations, residual: Tensor | None) -> Tensor | None:
        if layer.bias is not None:
            return self.apply(layer, x, with_bias=True)
        return w4_linear_for_sum(self._inputs(layer, x), layer.weight, layer.weight_scale, self.format, residual)

    def _inputs(self, layer: ShardedLinear, x: Activations) -> Tensor:
        """Reorder activations to match the weight's columns."""
        assert isinstance(x, Tensor), "only FP8 layers take quantised rows"
        return x.index_select(1, layer.column_order[0]) if self.has_order else x
