"""Fp8LinearMethod: linear layers with FP8 weights and dynamically quantised inputs; and Fp8WeightLinearMethod, for GPUs
without FP8 units: inputs are not quantised, and weights are dequantised in the product.

A weight keeps the checkpoint's FP8 scales if ranks can use scales of that shape; any other weight is quantised when it
is loaded. The checkpoint's scales for activations are not used: per-token scales lose less.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from nvcli.core.config_types import FP8Accumulation
from nvcli.kernels.activation import Activation
from nvcli.kernels.fp8 import fp8_gated_linear, fp8_linear, fp8_linear_for_sum, fp8_weight_linear, quantise
from nvcli.kernels.fp8_types import Activations, QuantisedRows
from nvcli.kernels.weight_formats import FP8Scaling
from nvcli.models.parallel import LinearMethod, PlainLinearMethod, ShardedLinear
from nvcli.models.weights import WeightSource, empty_fp8_scales


class Fp8LinearMethod(PlainLinearMethod):
    """Weights [rows, columns] e4m3, with scales [rows], or for blocks [rows / 128, columns / 128], rounded up."""

    def __init__(self, scaling: FP8Scaling, accumulation: FP8Accumulation = "exact") -> None:
        """Create the method. `accumulation` says how products are accumulated (`kernels/fp8.py`)."""
        self.scaling = scaling
        self.accumulation: FP8Accumulation = accumulation

    @property
    def input_scaling(self) -> FP8Scaling | None:
        return self.scaling

    def create(self, layer: ShardedLinear) -> None:
        super().create(layer)
        layer.weight_scale = empty_fp8_scales(layer.weight, self.scaling)

    def sources(self, layer: ShardedLinear) -> Iterator[WeightSource]:
        for source in super().sources(layer):
            yield source.in_fp8("weight_scale", self.scaling) if source.parameter == "weight" else source

    def apply(self, layer: ShardedLinear, x: Activations, *, with_bias: bool, out: Tensor | None = None) -> Tensor:
        bias = layer.bias if with_bias else None
        quantised = self._quantised(x)
        return fp8_linear(quantised, layer.weight, layer.weight_scale, bias, out, accumulation=self.accumulation)

    def apply_gated(
        self, layer: ShardedLinear, x: Activations, activation: Activation, scaling: FP8Scaling | None = None
    ) -> Activations:
        if scaling is None:
            return LinearMethod.apply_gated(self, layer, x, activation)
        quantised = self._quantised(x)
        return fp8_gated_linear(
            quantised, layer.weight, layer.weight_scale, layer.bias, activation, scaling, accumulation=self.accumulation
        )

    def apply_for_sum(self, layer: ShardedLinear, x: Activations, residual: Tensor | None) -> Tensor | None:
        if layer.bias is not None:
            return self.apply(layer, x, with_bias=True)
        quantised = self._quantised(x)
        return fp8_linear_for_sum(quantised, layer.weight, layer.weight_scale, accumulation=self.accumulation)

    def _quantised(self, x: Activations) -> QuantisedRows:
        return x if isinstance(x, QuantisedRows) else quantise(x, self.scaling)


class Fp8WeightLinearMethod(Fp8LinearMethod):
    """FP8 weights as in Fp8LinearMethod, and inputs in the model's type."""

    @property
    def input_scaling(self) -> FP8Scaling | None:
        return None

    def apply_for_sum(self, layer: ShardedLinear, x: Activations, residual: Tensor | None) -> Tensor | None:
        return self.apply(layer, x, with_bias=True)

    def apply(self, layer: ShardedLinear, x: Activations, *, with_bias: bool, out: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor), "the preceding operation does not quantise"
        return fp8_weight_linear(x, layer.weight, layer.weight_scale, layer.bias if with_bias else None, out)
