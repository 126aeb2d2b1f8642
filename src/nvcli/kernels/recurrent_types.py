"""Inputs of recurrent layers (`delta_net.py`, `selective_scan.py`, `channel_scan.py`) besides queries, keys and values.
T tokens, Hv value heads, Dk and Dv the sizes of their keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_NORM_EPS = 1e-6

Rule = Literal["delta", "scan", "channel scan"]
"""How a token changes a state: by the gated delta rule, or by the selective scan of Mamba-2 or of Mamba-1."""

Decays = Literal["head", "key", "value"]
"""The parts of a token that each have a decay: its heads, the numbers of its keys, or those of its values."""


def unit_length(x: Tensor) -> Tensor:
    """Normalise the vectors of the last dimension, float32, to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


@dataclass(frozen=True, slots=True)
class RecurrentHeads:
    """The heads of one rank's part of a layer. Passed to kernels as a whole; each field is a constant there."""

    num_key_heads: int
    key_dim: int
    num_value_heads: int
    value_dim: int
    rule: Rule = "delta"
    beta_scale: float = 1.0
    """A factor of β in the delta rule. Above 1, a token may turn round what its key reads from the state (negative
    eigenvalues, https://arxiv.org/abs/2411.12537)."""
    decays_by_channel: bool = False
    """Whether a token decays each row of a state by a number of its own (Kimi Delta Attention,
    https://arxiv.org/abs/2510.26692): by the delta rule alone, and with keys of its own for each value head."""
    lowest_decay: float | None = None
    """With decays by channel, the lowest logarithm that a decay may have; None: there is none. See
    `DeltaGates.decay`."""

    @property
    def decays(self) -> Decays:
        """The parts of a token that each have a decay."""
        if self.rule == "channel scan":
            return "value"
        return "key" if self.decays_by_channel else "head"

    @property
    def num_channels(self) -> int:
        """The size of a token's queries, keys and values together."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim


class DeltaGates(NamedTuple):
    """The tensors that the gates of the delta rule are computed from."""

    beta: Tensor
    """[T, Hv]; β is its sigmoid, times `RecurrentHeads.beta_scale`."""
    step: Tensor
    """[T, Hv], see `decay`; [T, Hv × Dk] where each row of a state has a decay of its own."""
    log_rate: Tensor
    """[Hv]."""
    step_bias: Tensor
    """[Hv] or [Hv × Dk], as `step`."""

    def decay(self, lowest: float | None = None) -> Tensor:
        """Compute the logarithm g of each token's decay: [T, Hv] or [T, Hv, Dk] float32, at most 0. It is
        -rate × softplus(step + bias), or with a `lowest` one, lowest × sigmoid(rate × (step + bias))."""
        rates = self.log_rate.float().exp()
        if self.step.shape[1] == len(rates):
            return -rates * _step_sizes(self.step, self.step_bias)
        rates, shape = rates.unsqueeze(1), (len(self.step), len(rates), -1)
        if lowest is not None:
            return lowest * torch.sigmoid(rates * (self.step.float() + self.step_bias.float()).view(shape))
        return -rates * _step_sizes(self.step, self.step_bias).view(shape)


class ScanGates(NamedTuple):
    """The tensors that the decays and factors of the selective scan are computed from."""

    step: Tensor
    """[T, Hv], see `step_sizes`."""
    log_rate: Tensor
    """[Hv]."""
    step_bias: Tensor
    """[Hv]."""
    skip: Tensor
    """[Hv]; a token's own value times this number is added to its result."""

    def step_sizes(self) -> Tensor:
        """The step size Δ of each token, the factor of what it writes: [T, Hv] float32, above 0."""
        return _step_sizes(self.step, self.step_bias)

    def decay(self) -> Tensor:
        """The logarithm g of each token's decay: [T, Hv] float32, at most 0."""
        return -self.log_rate.float().exp() * self.step_sizes()


class ChannelGates(NamedTuple):
    """The inputs of the scan of Mamba-1 besides its values: keys and queries, which all its channels share, and the
    tensors that step sizes and rates are computed from."""

    keys: Tensor
    """[T, Dk], rows as far apart as those of `queries`."""
    queries: Tensor
    """[T, Dk]."""
    step: Tensor
    """[T, Dv], see `step_sizes`."""
    log_rate: Tensor
    """[Dv, Dk], see `rates`."""
    step_bias: Tensor
    """[Dv]."""
    skip: Tensor
    """[Dv]; a channel's own value times this number is added to its result."""

    def step_sizes(self) -> Tensor:
        """The step size Δ of each token and channel, the factor of what it writes: [T, Dv] float32, above 0."""
        return _step_sizes(self.step, self.step_bias)

    def rates(self) -> Tensor:
        """The logarithm of a state's decay in a step of size 1: [Dk, Dv] float32, below 0."""
        return -self.log_rate.float().exp().T


def _step_sizes(step: Tensor, bias: Tensor) -> Tensor:
    sizes: Tensor = F.softplus(step.float() + bias.float())
    return sizes
