"""The methods of linear layers, by how ranks keep the weights of their pieces, and the choice among them. Runs that are
batch-invariant keep plain weights, which are multiplied in the same way for any number of rows.

An FP8 weight keeps the checkpoint's scales if ranks can use scales of that shape; any other weight is quantised when it
is loaded. The checkpoint's scales for activations are not used: scales for each token lose less. If a checkpoint in 4
bits grouped columns by importance (act-order), the columns of a weight are kept group by group, and activations are
reordered to match before they are multiplied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from nvcli.core.config_types import FP8Accumulation
from nvcli.kernels.activation import ACTIVATE_AND_MUL, Activation
from nvcli.kernels.fp8 import fp8_gated_linear, fp8_linear, fp8_linear_for_sum, fp8_weight_linear, quantise
from nvcli.kernels.fp8_types import Activations, QuantisedRows
from nvcli.kernels.invariant_linear import invariant_gated_linear, invariant_linear, row_by_row
from nvcli.kernels.rounded_inputs import round_rows
from nvcli.kernels.w4 import w4_gated_linear, w4_linear, w4_linear_for_sum
from nvcli.kernels.weight_formats import FP8Scaling, W4Format
from nvcli.models.parallel import LinearMethod, LinearPiece, PlainLinearMethod, ShardedLinear
from nvcli.models.weights import WeightSource, empty_fp8_scales, empty_w4, length


class RoundingLinearMethod(PlainLinearMethod):
    """Plain weights, which multiply rows that are rounded to 8 bits first."""

    def apply(self, layer: ShardedLinear, x: Activations, *, with_bias: bool, out: Tensor | None = None) -> Tensor:
        return super().apply(layer, _rounded(x), with_bias=with_bias, out=out)

    def apply_gated(
        self, layer: ShardedLinear, x: Activations, activation: Activation, scaling: FP8Scaling | None = None
    ) -> Activations:
        if layer.bias is not None:
            return super().apply_gated(layer, x, activation, scaling)  # which comes to `apply`
        return super().apply_gated(layer, _rounded(x), activation, scaling)

    def apply_for_sum(self, layer: ShardedLinear, x: Activations, residual: Tensor | None) -> Tensor | None:
        return super().apply_for_sum(layer, _rounded(x), residual)


def _rounded(x: Activations) -> Tensor:
    assert isinstance(x, Tensor), "only FP8 layers take quantised rows"
    return round_rows(x)


class Fp8WeightLinearMethod(LinearMethod):
    """Weights [rows, columns] e4m3, with scales [rows], or for blocks [rows / 128, columns / 128], rounded up, and
    inputs in the model's type."""

    def __init__(self, scaling: FP8Scaling) -> None:
        self.scaling = scaling

    def create(self, layer: ShardedLinear) -> None:
        super().create(layer)
        layer.weight_scale = empty_fp8_scales(layer.weight, self.scaling)

    def sources(self, layer: ShardedLinear) -> Iterator[WeightSource]:
        for source in super().sources(layer):
            yield source.in_fp8("weight_scale", self.scaling) if source.parameter == "weight" else source

    def apply(self, layer: ShardedLinear, x: Activations, *, with_bias: bool, out: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor), "the preceding operation does not quantise"
        return fp8_weight_linear(x, layer.weight, layer.weight_scale, layer.bias if with_bias else None, out)


class Fp8LinearMethod(Fp8WeightLinearMethod):
    """The same weights, and inputs that are quantised likewise."""

    def __init__(self, scaling: FP8Scaling, accumulation: FP8Accumulation) -> None:
        """Create the method. `accumulation` says how products are accumulated (`kernels/fp8.py`)."""
        super().__init__(scaling)
        self.accumulation: FP8Accumulation = accumulation

    @property
    def input_scaling(self) -> FP8Scaling | None:
        return self.scaling

    def apply(self, layer: ShardedLinear, x: Activations, *, with_bias: bool, out: Tensor | None = None) -> Tensor:
        bias = layer.bias if with_bias else None
        quantised = self._quantised(x)
        return fp8_linear(quantised, layer.weight, layer.weight_scale, bias, out, accumulation=self.accumulation)

    def apply_gated(
        self, layer: ShardedLinear, x: Activations, activation: Activation, scaling: FP8Scaling | None = None
    ) -> Activations:
        if scaling is None:
            return super().apply_gated(layer, x, activation)
        quantised = self._quantised(x)
        return fp8_gated_linear(
            quantised, layer.weight, layer.weight_scale, layer.bias, activation, scaling, accumulation=self.accumulation
        )

    def apply_for_sum(self, layer: ShardedLinear, x: Activations, residual: Tensor | None) -> Tensor | None:
        quantised = self._quantised(x)
        return fp8_linear_for_sum(quantised, layer.weight, layer.weight_scale, accumulation=self.accumulation)

    def _quantised(self, x: Activations) -> QuantisedRows:
        return x if isinstance(x, QuantisedRows) else quantise(x, self.scaling)


class W4LinearMethod(LinearMethod):
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
        layer.bias = layer.empty_bias()

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
            return super().apply_gated(layer, x, activation)
        return w4_gated_linear(self._inputs(layer, x), layer.weight, layer.weight_scale, self.format, activation)

    def apply_for_sum(self, layer: ShardedLinear, x: Activations, residual: Tensor | None) -> Tensor | None:
        return w4_linear_for_sum(self._inputs(layer, x), layer.weight, layer.weight_scale, self.format, residual)

    def _inputs(self, layer: ShardedLinear, x: Activations) -> Tensor:
        """Reorder activations to match the weight's columns."""
        assert isinstance(x, Tensor), "only FP8 layers take quantised rows"
        return x.index_select(1, layer.column_order[0]) if self.has_order else x


class InvariantLinearMethod(LinearMethod):
    """Plain weights. A row's product is bitwise the same whatever other rows there are."""

    def apply(self, layer: ShardedLinear, x: Activations, *, with_bias: bool, out: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        return invariant_linear(x, layer.weight, layer.bias if with_bias else None, out)

    def apply_gated(
        self, layer: ShardedLinear, x: Activations, activation: Activation, scaling: FP8Scaling | None = None
    ) -> Activations:
        if layer.bias is None:
            assert isinstance(x, Tensor)
            return invariant_gated_linear(x, layer.weight, activation)
        return row_by_row(ACTIVATE_AND_MUL[activation], self.apply(layer, x, with_bias=True))


def linear_method(
    pieces: Sequence[LinearPiece],
    *,
    rounds_inputs: bool,
    batch_invariant: bool,
    has_fp8_units: bool,
    fp8_accumulation: FP8Accumulation,
) -> LinearMethod:
    """Return the method of a layer. All its pieces are kept in the same way (`geometry.py`). `rounds_inputs`: rows are
    rounded to 8 bits first; the others are those of `build_model`."""
    weight = pieces[0].weight
    scaling, groups = weight.scaling, weight.w4
    assert all((piece.weight.scaling, piece.weight.w4) == (scaling, groups) for piece in pieces)
    if batch_invariant:
        assert scaling is None is groups, "ModelConfig.check_batch_invariant comes first"
        return InvariantLinearMethod()
    if groups is not None:
        kept = groups.kept(length(pieces[0].columns), *(length(piece.rows) for piece in pieces))
        assert kept is not None, "ModelConfig.check_tensor_parallel comes first"
        return W4LinearMethod(kept, has_order=groups.has_order)
    if scaling is None:
        return RoundingLinearMethod() if rounds_inputs else PlainLinearMethod()
    return Fp8LinearMethod(scaling, fp8_accumulation) if has_fp8_units else Fp8WeightLinearMethod(scaling)
