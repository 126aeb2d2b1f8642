"""LightningAttention: a layer's linear attention with a fixed decay for each head, sharded over the ranks by heads.

It is the selective scan (`kernels/selective_scan.py`) with step sizes of 1, decays that no token changes, and a query
and a key for each head. Shapes: T tokens, H hidden, Hv heads of this rank, D their size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import StateCache
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.gates import gate_values
from nvcli.kernels.recurrent_types import RecurrentHeads, ScanGates
from nvcli.kernels.selective_scan import selective_scan
from nvcli.models.layers import Angles, RowNorm, TokenMixer
from nvcli.models.mixers.lightning import PROJECTIONS, LightningConfig
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, RowParallelLinear
from nvcli.models.weights import DerivedModule

_BIAS_OF_ONE = math.log(math.e - 1)
"""Its softplus is 1."""


class LightningAttention(TokenMixer):
    """Lightning attention: [T, H] → [T, Hv × D], the input of `o_proj`."""

    cache: StateCache

    def __init__(
        self, build: BuildContext, path: str, config: LightningConfig, norm: NormConfig, cache: StateCache
    ) -> None:
        super().__init__(cache)
        num_heads, head_dim, _ = cache.spec.recurrent_shape
        self.heads = RecurrentHeads(num_heads, head_dim, num_heads, head_dim, rule="scan")
        first = build.group.rank * num_heads
        self.gates = FixedGates(config.rates[first : first + num_heads])
        self.in_proj = ColumnParallelLinear(build, f"{path}.in_proj", PROJECTIONS)
        self.norm = RowNorm(build, f"{path}.norm", replace(norm, eps=config.norm_eps), config.inner_size)
        self.o_proj = RowParallelLinear(build, f"{path}.out_proj")

    def forward(self, x: Activations, angles: Angles, batch: ForwardBatch) -> Tensor:
        """Compute the tokens' outputs, and store the states after them; for rows with drafts, store what is needed to
        advance their states later."""
        _, pool, rows, kept = batch.states(self.cache)
        projected = self.in_proj(x, batch.token_adapters)
        qkv = F.silu(projected[:, : self.heads.num_channels], inplace=True)
        out = selective_scan(qkv, self.gates(len(qkv)), pool, rows, self.heads, kept)
        return gate_values(self.norm(out.flatten(1)), projected[:, self.heads.num_channels :])


class FixedGates(DerivedModule):
    """The gates of a scan whose heads each decay at a fixed rate, and whose tokens write their values as they are."""

    numbers: Tensor
    """[4, Hv] float32, the rows of `ScanGates`."""

    def __init__(self, rates: Sequence[float]) -> None:
        super().__init__()
        self.rates = rates
        self.register_buffer("numbers", torch.empty(4, len(rates), dtype=torch.float32), persistent=False)

    def derive(self, device: torch.device) -> None:
        zeros = [0.0] * len(self.rates)
        rows = zeros, list(map(math.log, self.rates)), [_BIAS_OF_ONE] * len(self.rates), zeros
        self.numbers = torch.tensor(rows, dtype=torch.float32, device=device)

    def forward(self, num_tokens: int) -> ScanGates:
        step, log_rate, step_bias, skip = self.numbers.unbind()
        return ScanGates(step.expand(num_tokens, -1), log_rate, step_bias, skip)
