"""The choice of a linear layer's method, by how ranks keep the weights of its pieces, and the method of batch-invariant
runs: plain weights, multiplied in the same way for any number of rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nvcli.core.config_types import FP8Accumulation
from nvcli.kernels.activation import ACTIVATE_AND_MUL, Activation
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.invariant_linear import invariant_gated_linear, invariant_linear, row_by_row
from nvcli.kernels.weight_formats import FP8Scaling
from nvcli.models.fp8_linear import Fp8LinearMethod, Fp8WeightLinearMethod
from nvcli.models.parallel import LinearMethod, LinearPiece, PlainLinearMethod, ShardedLinear
from nvcli.models.w4_linear import W4LinearMethod
from nvcli.models.weights import length


class InvariantLinearMethod(PlainLinearMethod):
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

    def apply_for_sum(self, layer: ShardedLinear, x: Activations, residual: Tensor | None) -> Tensor | None:
        return self.apply(layer, x, with_bias=True)


def linear_method(
    pieces: Sequence[LinearPiece], *, batch_invariant: bool, has_fp8_units: bool, fp8_accumulation: FP8Accumulation
) -> LinearMethod:
    """Return the method of a layer. All its pieces are kept in the same way (`geometry.py`); the others are those of
    `build_model`."""
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
        return PlainLinearMethod()
    return Fp8LinearMethod(scaling, fp8_accumulation) if has_fp8_units else Fp8WeightLinearMethod(scaling)
