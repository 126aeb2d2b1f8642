"""The choice of a linear layer's method, by how ranks keep the weights of its pieces."""

from __future__ import annotations

from collections.abc import Sequence

from nvcli.models.fp8_linear import Fp8LinearMethod
from nvcli.models.invariant_linear_method import InvariantLinearMethod
from nvcli.models.parallel import LinearMethod, LinearPiece, PlainLinearMethod


def linear_method(path: str, pieces: Sequence[LinearPiece]) -> LinearMethod:
    """Return the method of the layer `path`. All pieces of a layer are kept alike (`geometry.py`)."""
    scaling = pieces[0].weight.scaling
    assert all(piece.weight.scaling == scaling for piece in pieces)
    return PlainLinearMethod() if scaling is None else Fp8LinearMethod(scaling)


def invariant_linear_method(path: str, pieces: Sequence[LinearPiece]) -> LinearMethod:
    """Return the method of the layer `path` in a run that is batch-invariant, whose weights are plain ones."""
    assert all(piece.weight.scaling is None for piece in pieces), "ModelConfig.check_batch_invariant comes first"
    return InvariantLinearMethod()
