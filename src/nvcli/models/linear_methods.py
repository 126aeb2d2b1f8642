"""The choice of a linear layer's method, by how ranks keep the weights of its pieces."""

from __future__ import annotations

from collections.abc import Sequence

from nvcli.config_types import FP8Accumulation
from nvcli.models.fp8_linear import Fp8LinearMethod, Fp8WeightLinearMethod
from nvcli.models.invariant_linear_method import InvariantLinearMethod
from nvcli.models.parallel import LinearMethod, LinearPiece, PlainLinearMethod
from nvcli.models.w4_linear import W4LinearMethod
from nvcli.models.weights import length


def linear_method(
    path: str, pieces: Sequence[LinearPiece], *, has_fp8_units: bool = True, fp8_accumulation: FP8Accumulation = "exact"
) -> LinearMethod:
    """Return the method of the layer `path`. All pieces of a layer are kept alike (`geometry.py`).

    `has_fp8_units` says whether activations may be multiplied in FP8, and `fp8_accumulation` how such products
    are added up (`RunConfig`).
    """
    weight = pieces[0].weight
    scaling, groups = weight.scaling, weight.w4
    assert all((piece.weight.scaling, piece.weight.w4) == (scaling, groups) for piece in pieces)
    if groups is not None:
        kept = groups.kept(length(pieces[0].columns))
        assert kept is not None, "ModelConfig.check_tensor_parallel comes first"
        return W4LinearMethod(kept, has_order=groups.has_order)
    if scaling is None:
        return PlainLinearMethod()
    return Fp8LinearMethod(scaling, fp8_accumulation) if has_fp8_units else Fp8WeightLinearMethod(scaling)


def invariant_linear_method(path: str, pieces: Sequence[LinearPiece]) -> LinearMethod:
    """Return the method of the layer `path` in a run that is batch-invariant, whose weights are plain ones."""
    assert all(piece.weight.scaling is None is piece.weight.w4 for piece in pieces), (
        "ModelConfig.check_batch_invariant comes first"
    )
    return InvariantLinearMethod()
