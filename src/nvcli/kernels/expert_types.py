"""The tensors of a mixture of experts: which experts each token goes to, and the experts' weights.

Shapes: T tokens, H hidden, E experts that are held, k experts per token, I intermediate size.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nvcli.kernels.weight_formats import W4Format


class Routes(NamedTuple):
    """The experts of each token, no expert twice, the best one first."""

    experts: Tensor
    """[T, k] int32."""
    weights: Tensor
    """[T, k] float32."""


class ExpertWeights(NamedTuple):
    """The weights of a layer's experts, or of those of them that this rank holds, contiguous."""

    gate_up: Tensor
    """[E, 2 I, H]: each expert's gate projection above its up projection."""
    down: Tensor
    """[E, H, I]."""
    gate_up_bias: Tensor | None = None
    """[E, 2 I]."""
    down_bias: Tensor | None = None
    """[E, H]."""
    first_expert: int = 0
    """The number of the first of these experts among all that tokens are routed to."""
    num_others: int = 0
    """How many experts other ranks hold. What tokens choose of them gives zeros here."""


class ExpertScales(NamedTuple):
    """The scales of experts' weights in FP8, float32, contiguous (`kernels/fp8.py`)."""

    gate_up: Tensor
    """[E, 2 I], or for blocks [E, 2 I / 128, H / 128]."""
    down: Tensor
    """[E, H], or for blocks [E, H / 128, I / 128]. Numbers of blocks are rounded up."""


class W4Scales(NamedTuple):
    """The scales of experts' weights in 4 bits, contiguous (`kernels/w4.py`). The weights themselves are words there:
    gate_up [E, 2 I, H / 4], down [E, H, I / 4], in whole tiles."""

    gate_up: Tensor
    """[E, groups or tiles, 2 I] int32."""
    down: Tensor
    """[E, groups or tiles, H] int32."""
    gate_up_format: W4Format
    down_format: W4Format
