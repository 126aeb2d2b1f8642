"""Fp8LinearMethod: linear layers whose weights ranks keep in FP8, and whose inputs are quantised as they come; and
Fp8WeightLinearMethod, for GPUs without FP8 units: inputs stay as they are, and weights are dequantised in the product.

A weight's scales are those of the checkpoint where it has such ones; any other weight is quantised when it is loaded.
Scales of the checkpoint for activations are not used: those of each token lose less.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nvcli.config_types import FP8Accumulation
from nvcli.kernels.activation import Activation
from nvcli.kernels.fp8 import fp8_gated_linear, fp8_linear, fp8_linear_for_sum, fp8_weight_linear, quantise
from nvcli.kernels.fp8_types import Activations, QuantisedRows
from nvcli.kernels.weight_formats import FP8_BLOCK, FP8Scaling, scale_shape
from nvcli.models.parallel import LinearMethod, PlainLinearMethod, ShardedLinear
from nvcli.models.weights import ScaleTarget, WeightSource, empty_parameter, length


class Fp8LinearMethod(PlainLinearMethod):
    """Weights [rows, columns] e4m3, with scales [rows], or for blocks [rows / 128, columns / 128], rounded up."""

    def __init__(self, scaling: FP8Scaling, accumulation: FP8Accumulation = "exact") -> None:
        """`accumulation` says how products are added up (`kernels/fp8.py`)."""
        self.scaling = scaling
        self.accumulation: FP8Accumulation = accumulation

    @property
    def input_scaling(self) -> FP8Scaling | None:
        return self.scaling

    def create(self, layer: ShardedLinear) -> None:
        super().create(layer)
        rows, columns = layer.weight.shape
        scales = torch.empty(scale_shape(rows, columns, self.scaling), dtype=torch.float32)
        layer.weight_scale = nn.Parameter(scales, requires_grad=False)
        if layer.bias is not None:
            assert layer.pieces[0].bias is not None
            layer.bias = empty_parameter(layer.pieces[0].bias, rows)

    def sources(self, layer: ShardedLinear) -> Iterator[WeightSource]:
        for source in super().sources(layer):
            if source.parameter != "weight":
                yield source
                continue
            rows, columns = source.write
            assert isinstance(rows, slice)
            assert isinstance(columns, slice)
            place: tuple[int | slice, ...] = (rows,)
            if self.scaling == "block":
                place = (slice(rows.start // FP8_BLOCK, -(-rows.stop // FP8_BLOCK)), slice(None))
                # ModelConfig.check_tensor_parallel comes first
                assert rows.start % FP8_BLOCK == 0, "blocks of fused projections must not overlap"
                assert all(part.start % FP8_BLOCK == 0 for part in source.read), "blocks must not be cut"
                assert length(columns) == layer.weight.shape[1]
            yield source.with_scales(ScaleTarget(parameter="weight_scale", write=place, scaling=self.scaling))

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
    """Weights as Fp8LinearMethod keeps them, and inputs in the type of the model."""

    @property
    def input_scaling(self) -> FP8Scaling | None:
        return None

    def apply_for_sum(self, layer: ShardedLinear, x: Activations, residual: Tensor | None) -> Tensor | None:
        return self.apply(layer, x, with_bias=True)

    def apply(self, layer: ShardedLinear, x: Activations, *, with_bias: bool, out: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor), "what comes before is not told to quantise"
        return fp8_weight_linear(x, layer.weight, layer.weight_scale, layer.bias if with_bias else None, out)
