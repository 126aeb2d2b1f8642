"""RgLru: a layer's linear recurrence of single channels with gates (`mixers/rg_lru.py`), sharded over the ranks by
heads. It is a scan of Mamba-1 (`kernels/channel_scan.py`) whose states have one number.

With gates r and i from 0 to 1 of each token and channel, and rates A of channels, a state decays by a = exp(-A r), and
√(1 - a²) i x is added to it. In the scan's terms r is the step size, and the value is what is added, divided by r.

Shapes: T tokens, H hidden, C channels of this rank, D channels of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import StateCache
from nvcli.kernels.activation import gelu_tanh_times
from nvcli.kernels.channel_scan import channel_scan
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.recurrent_types import ChannelGates, RecurrentHeads
from nvcli.models.layers import Angles, TokenMixer
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.mixers.rg_lru import FUSED_INPUTS, RgLruConfig
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, RowParallelLinear, TensorShard, TensorShards
from nvcli.models.short_conv import Convolution

_RATE = 8.0
"""The factor of all rates."""
_LEAST_STEP = 1e-12
"""Gates are at least so open, as values are divided by them."""


class HeadGate(TensorShards):
    """A gate of each channel, computed from all channels of its head: [T, C] → [T, C] float32, from 0 to 1."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, build: BuildContext, path: str) -> None:
        super().__init__(build, {kind: f"{path}_{kind}" for kind in ("weight", "bias")})

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(len(x), *self.bias.shape).transpose(0, 1)  # [heads, T, D]
        logits = torch.baddbmm(self.bias.unsqueeze(1), heads, self.weight)
        return torch.sigmoid(logits.transpose(0, 1).flatten(1).float())


class RgLru(TokenMixer):
    """Gelu(y) × the recurrence of a short convolution of x, of two projections y and x: [T, H] → [T, C], the input of
    `o_proj`."""

    cache: StateCache
    quantised_input = "in_proj"

    def __init__(
        self, build: BuildContext, path: str, config: RgLruConfig, norm: NormConfig, cache: StateCache
    ) -> None:
        super().__init__(cache)
        num_channels = cache.spec.recurrent_shape[2]
        self.heads = RecurrentHeads(1, 1, 1, num_channels, rule="channel scan")
        self.in_proj = ColumnParallelLinear(build, f"{path}.in_proj", FUSED_INPUTS)
        self.conv = Convolution(build, [f"{path}.conv1d"])
        self.rate = TensorShard(build, f"{path}.recurrent_param")  # [C]
        self.input_gate = HeadGate(build, f"{path}.input_gate")
        self.step_gate = HeadGate(build, f"{path}.recurrent_gate")
        self.o_proj = RowParallelLinear(build, f"{path}.out_proj")

    def forward(self, x: Activations, angles: Angles, batch: ForwardBatch) -> Tensor:
        """Compute the tokens' outputs, and store the states after them; for rows with drafts, store what is needed to
        advance their states later."""
        conv_pool, pool, rows, kept = batch.states(self.cache)
        factors, inputs = self.in_proj(x, batch.token_adapters).chunk(2, dim=1)
        values = self.conv(inputs, conv_pool, rows, kept, activates=False)
        rates = _RATE * F.softplus(self.rate.weight)
        steps = self.step_gate(values).clamp_(min=_LEAST_STEP)
        share = torch.sqrt(-torch.expm1(-2.0 * rates * steps))
        share = share.masked_fill((batch.positions == 0).unsqueeze(1), 1.0)  # no state shares the first result
        added = self.input_gate(values) * share * values / steps
        ones, zeros = values.new_ones(len(values), 1), torch.zeros_like(rates)
        gates = ChannelGates(
            keys=ones,
            queries=ones,
            step=torch.log(torch.expm1(steps)),  # of which the scan takes the softplus
            log_rate=rates.log().unsqueeze(1),
            step_bias=zeros,
            skip=zeros,
        )
        out = channel_scan(added.to(values.dtype), gates, pool, rows, self.heads, kept)
        return gelu_tanh_times(factors, out.flatten(1))
