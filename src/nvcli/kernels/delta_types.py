"""Inputs of the gated delta rule (`delta_net.py`) besides queries, keys and values. T tokens, Hv value heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_NORM_EPS = 1e-6


def unit_length(x: Tensor) -> Tensor:
    """Normalise the vectors of the last dimension, float32, to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The heads of one rank's part of a layer. Passed to kernels as a whole; each field is a constant there."""

    num_key_heads: int
    key_dim: int
    num_value_heads: int
    value_dim: int

    @property
    def num_channels(self) -> int:
        """The size of a token's queries, keys and values together."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


class DeltaGates(NamedTuple):
    """The tensors that a layer's gates are computed from."""

    beta: Tensor
    """[T, Hv]; β is its sigmoid."""
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
