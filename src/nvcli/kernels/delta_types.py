"""Inputs of the gated delta rule (`delta_net.py`) beside queries, keys and values. T tokens, Hv value heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_NORM_EPS = 1e-6


def unit_length(x: Tensor) -> Tensor:
    """Divide the vectors of the last dimension, float32, by their lengths."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The heads of one rank's part of a layer. Kernels take it whole: each field is a constant of theirs."""

    num_key_heads: int
    key_dim: int
    num_value_heads: int
    value_dim: int

    @property
    def num_channels(self) -> int:
        """The size of a token's queries, keys and values together."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


class DeltaGates(NamedTuple):
    """Tensors from which a layer's gates are computed."""

    beta: Tensor
    """[T, Hv], of which β is the sigmoid."""
    step: Tensor
    """[T, Hv], see `decay`."""
    log_rate: Tensor
    """[Hv]."""
    step_bias: Tensor
    """[Hv]."""

    def decay(self) -> Tensor:
        """The logarithm g of each token's decay: [T, Hv] float32, at most 0."""
        steps: Tensor = F.softplus(self.step.float() + self.step_bias.float())
        return -self.log_rate.float().exp() * steps
