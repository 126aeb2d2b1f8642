"""The linear method of runs that are batch-invariant: plain weights, and one way to multiply any number of rows."""

from __future__ import annotations

from torch import Tensor

from nvcli.kernels.activation import ACTIVATE_AND_MUL, Activation
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.invariant_linear import invariant_gated_linear, invariant_linear, row_by_row
from nvcli.kernels.weight_formats import FP8Scaling
from nvcli.models.parallel import PlainLinearMethod, ShardedLinear


class InvariantLinearMethod(PlainLinearMethod):
    """Weights as they are. A row's product has the same bits whatever other rows there are."""

    def apply(self, layer: ShardedLinear, x: Activations, *, with_bias: bool) -> Tensor:
        assert isinstance(x, Tensor)
        return invariant_linear(x, layer.weight, layer.bias if with_bias else None)

    def apply_gated(
        self, layer: ShardedLinear, x: Activations, activation: Activation, scaling: FP8Scaling | None = None
    ) -> Activations:
        if layer.bias is None:
            assert isinstance(x, Tensor)
            return invariant_gated_linear(x, layer.weight, activation)
        return row_by_row(ACTIVATE_AND_MUL[activation], self.apply(layer, x, with_bias=True))

    def apply_for_sum(self, layer: ShardedLinear, x: Activations, residual: Tensor | None) -> Tensor | None:
        return self.apply(layer, x, with_bias=True)

    def apply_into(self, layer: ShardedLinear, x: Activations, out: Tensor, *, with_bias: bool) -> Tensor:
        assert isinstance(x, Tensor)
        return invariant_linear(x, layer.weight, layer.bias if with_bias else None, out)
