"""The tensors of a mixture of experts: which experts each token goes to, and the experts' weights.

Shapes: T tokens, H hidden, E experts that are held, k experts per token, I intermediate size.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from nvcli.kernels.weight_formats import FP8_BLOCK, FP8Scaling, W4Format, W4Kind


class Routes(NamedTuple):
    """The experts of each token, no expert twice, the best one first."""

    experts: Tensor
    """[T, k] int32."""
    weights: Tensor
    """[T, k] float32."""
    shared: Tensor | None = None
    """[T, shared experts] float32, the weights of those that the router weighs; None: it weighs none."""


class ExpertWeights(NamedTuple):
    """The weights of a layer's experts, or of those of them that this rank holds, contiguous."""

    gate_up: Tensor
    """[E, 2 I, H]: each expert's gate projection above its up projection; without gates [E, I, H], and so below."""
    down: Tensor
    """[E, H, I]."""
    gate_up_bias: Tensor | None = None
    """[E, 2 I]."""
    down_bias: Tensor | None = None
    """[E, H]."""
    first_expert: int = 0
    """The number of the first of these experts among all that tokens are routed to."""
    num_others: int = 0
    """How many experts other ranks hold. What would be results of them here are undefined numbers, or none at all."""


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

    @property
    def is_for_fp8(self) -> bool:
        """Whether the weights are multiplied by activations in FP8."""
        return self.gate_up_format.kind == "mxfp4 for fp8"


WeightKind = FP8Scaling | W4Kind | Literal["plain"]
"""The format of a weight: plain numbers, FP8 with scales of rows or blocks, or 4 bits."""


def weight_kind(scale_dims: int | None, format: W4Format | None) -> WeightKind:
    """Return the format of a weight [out, in], whose scales have one dimension, for its rows, or two; None: it has
    none."""
    if format is not None:
        return format.kind
    if scale_dims is None:
        return "plain"
    return "channel" if scale_dims == 1 else "block"


class ExpertMatrix(NamedTuple):
    """One of both matrices of a layer's experts, or of one of them."""

    weight: Tensor
    """[E, out, in], or [out, in]; words in 4 bits."""
    bias: Tensor | None
    """[E, out], or [out]."""
    scales: Tensor | None
    format: W4Format | None
    """Only of a weight in 4 bits."""

    @property
    def kind(self) -> WeightKind:
        """The kind of the matrix of all experts."""
        return weight_kind(None if self.scales is None else self.scales.dim() - 1, self.format)

    @property
    def group(self) -> int:
        """How many neighbours of a row share a scale, where they do."""
        return FP8_BLOCK if self.format is None else self.format.group

    def of_expert(self, expert: int) -> ExpertMatrix:
        """Return the matrix of one expert."""
        bias, scales = (None if tensor is None else tensor[expert] for tensor in (self.bias, self.scales))
        return ExpertMatrix(self.weight[expert], bias, scales, self.format)


def matrices(weights: ExpertWeights, scales: ExpertScales | W4Scales | None) -> tuple[ExpertMatrix, ExpertMatrix]:
    """Return the matrices of the gate and up, and of the down projection."""
    of_both = (None, None) if scales is None else scales[:2]
    formats = (scales.gate_up_format, scales.down_format) if isinstance(scales, W4Scales) else (None, None)
    return (
        ExpertMatrix(weights.gate_up, weights.gate_up_bias, of_both[0], formats[0]),
        ExpertMatrix(weights.down, weights.down_bias, of_both[1], formats[1]),
    )
