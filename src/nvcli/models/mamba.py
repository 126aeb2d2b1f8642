"""Mamba: a layer's selective state space (`kernels/selective_scan.py`), sharded over the ranks by heads, and Mamba1:
that of single channels (`kernels/channel_scan.py`), sharded by channels.

Ranks keep the rows of Mamba-2's input projection in the order of delta nets: queries (C), keys (B) and values (x), then
the gates (z) and the step sizes. Shapes: T tokens, H hidden, Hv heads of this rank, Dv their size, C channels of this
rank, N the size of a channel's state, R that of what step sizes are projected from.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import StateCache
from nvcli.kernels.channel_scan import channel_scan
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.gates import gate_values
from nvcli.kernels.norm import gated_rms_norm, norm_parts
from nvcli.kernels.recurrent_types import ChannelGates, RecurrentHeads, ScanGates
from nvcli.kernels.selective_scan import selective_scan
from nvcli.models.layers import Angles, TokenMixer
from nvcli.models.mixers.mamba import NORMS, Mamba1Config, MambaConfig
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, RowParallelLinear, TensorShard
from nvcli.models.short_conv import Convolution
from nvcli.models.tensor_spec import FUSED
from nvcli.models.weights import WeightModule, WeightSource, empty_parameter, stacked_rows


class Mamba(TokenMixer):
    """A selective state space: [T, H] → [T, Hv × Dv], the input of `o_proj`."""

    cache: StateCache

    def __init__(
        self, build: BuildContext, path: str, config: MambaConfig, norm: NormConfig, cache: StateCache
    ) -> None:
        super().__init__(cache)
        num_heads, key_dim, value_dim = cache.spec.recurrent_shape
        num_groups = config.groups_per_rank(build.group.size)
        self.heads = RecurrentHeads(num_groups, key_dim, num_heads, value_dim, rule="scan")
        order = ("in_proj_C", "in_proj_B", "in_proj_x", "in_proj_z", "in_proj_dt")
        self.in_proj = ColumnParallelLinear(build, f"{path}.in_proj", order)
        self.conv = Convolution(build, [f"{path}.conv1d_{part}" for part in ("C", "B", "x")])
        # One number for each of this rank's heads: [Hv].
        self.log_rate = TensorShard(build, f"{path}.A_log")
        self.step_bias = TensorShard(build, f"{path}.dt_bias")
        self.skip = TensorShard(build, f"{path}.D")
        self.norm = None if config.norm is None else GatedNorm(build, f"{path}.norm", config)
        self.o_proj = RowParallelLinear(build, f"{path}.out_proj")

    def forward(self, x: Activations, angles: Angles, batch: ForwardBatch) -> Tensor:
        """Compute the tokens' outputs, and store the states after them; for rows with drafts, store what is needed to
        advance their states later."""
        assert isinstance(x, Tensor), "its input is not quantised"
        conv_pool, pool, rows, kept = batch.states(self.cache)
        heads, channels = self.heads, self.heads.num_channels
        projected = self.in_proj(x, batch.token_adapters)
        gates_end = channels + heads.num_value_heads * heads.value_dim
        qkv = self.conv(projected[:, :channels], conv_pool, rows, kept)
        gates = ScanGates(
            step=projected[:, gates_end:],
            log_rate=self.log_rate.weight,
            step_bias=self.step_bias.weight,
            skip=self.skip.weight,
        )
        out = selective_scan(qkv, gates, pool, rows, heads, kept)
        out, gate = out.flatten(1), projected[:, channels:gates_end]
        return gate_values(out, gate, "silu") if self.norm is None else self.norm(out, gate)


class GatedNorm(TensorShard):
    """The norm of the result over the heads of each group: norm(x × silu(gate)) × weight, or norm(x) × weight ×
    silu(gate). x, gate: [T, Hv × Dv] → the same shape. Where ranks share a group, its squares are summed over them."""

    def __init__(self, build: BuildContext, path: str, config: MambaConfig) -> None:
        super().__init__(build, f"{path}.weight")
        self.eps = config.norm_eps
        self.num_groups = config.num_groups
        self.group_size = config.inner_size // config.num_groups
        self.gates_first = config.norm == "after gate"
        self.own_groups = config.groups_per_rank(self.group.size)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if self.num_groups >= self.group.size:
            by_group = self.own_groups, self.group_size
            gates = gate.as_strided((len(x), *by_group), (gate.stride(0), self.group_size, 1), gate.storage_offset())
            weight = self.weight.view(by_group)
            return gated_rms_norm(
                x.view(len(x), *by_group), gates, weight, self.eps, gates_first=self.gates_first
            ).flatten(1)
        factor = F.silu(gate.float())
        values = x.float() * factor if self.gates_first else x.float()
        # A column for each group, so that one sum over all ranks adds up what belongs together.
        squares = torch.zeros(len(x), self.num_groups, dtype=torch.float32, device=x.device)
        own = self.group.rank * self.num_groups // self.group.size
        squares[:, own] = values.square().sum(-1)
        mean = self.group.sum_of_squares(squares)[:, own, None] / self.group_size
        normed = values * torch.rsqrt(mean + self.eps) * self.weight
        return (normed if self.gates_first else normed * factor).to(x.dtype)


class Mamba1(TokenMixer):
    """A selective state space of single channels: [T, H] → [T, C], the input of `o_proj`."""

    cache: StateCache
    quantised_input = "in_proj"

    def __init__(
        self, build: BuildContext, path: str, config: Mamba1Config, norm: NormConfig, cache: StateCache
    ) -> None:
        super().__init__(cache)
        num_heads, state_size, num_channels = cache.spec.recurrent_shape
        self.heads = RecurrentHeads(num_heads, state_size, num_heads, num_channels, rule="channel scan")
        self.shared_sizes = config.shared_sizes
        self.in_proj = ColumnParallelLinear(build, f"{path}.xz_proj", FUSED["xz_proj"])
        self.conv = Convolution(build, [f"{path}.conv1d"])
        self.shared_proj = RowParallelLinear(build, f"{path}.x_proj")
        self.step_proj = ColumnParallelLinear(build, f"{path}.dt_proj", ("dt_proj",))
        self.log_rate = TensorShard(build, f"{path}.A_log")  # [C, N]
        self.step_bias = TensorShard(build, f"{path}.dt_bias")  # [C]
        self.skip = TensorShard(build, f"{path}.D")  # [C]
        self.norm = None if config.norm_eps is None else SharedNorm(build, path, config, config.norm_eps)
        self.o_proj = RowParallelLinear(build, f"{path}.out_proj")

    def forward(self, x: Activations, angles: Angles, batch: ForwardBatch) -> Tensor:
        """Compute the tokens' outputs, and store the states after them; for rows with drafts, store what is needed to
        advance their states later."""
        conv_pool, pool, rows, kept = batch.states(self.cache)
        adapters = batch.token_adapters
        inputs, output_gates = self.in_proj(x, adapters).chunk(2, dim=1)
        values = self.conv(inputs, conv_pool, rows, kept)
        for_steps, keys, queries = self._shared(values, batch)
        gates = ChannelGates(
            keys=keys,
            queries=queries,
            step=self.step_proj(for_steps, adapters),
            log_rate=self.log_rate.weight,
            step_bias=self.step_bias.weight,
            skip=self.skip.weight,
        )
        out = channel_scan(values, gates, pool, rows, self.heads, kept)
        return gate_values(out.flatten(1), output_gates, "silu")

    def _shared(self, values: Tensor, batch: ForwardBatch) -> tuple[Tensor, ...]:
        """Compute what all channels share, of those of all ranks: [T, C] → [T, R], and keys and queries [T, N]."""
        part = self.shared_proj.part(values, adapters=batch.token_adapters)
        shared = self.shared_proj.group.sum(part)
        return torch.split(shared if self.norm is None else self.norm(shared), list(self.shared_sizes), dim=1)


class SharedNorm(WeightModule):
    """The separate norms of the inputs of step sizes, of keys and of queries: [T, R + 2 N] → the same shape."""

    weight: nn.Parameter | None

    def __init__(self, build: BuildContext, path: str, config: Mamba1Config, eps: float) -> None:
        super().__init__()
        self.eps, self.sizes = eps, config.shared_sizes
        self.tensors = [build.tensors[f"{path}.{name}.weight"] for name in NORMS] if config.norm_has_weight else []
        self.weight = empty_parameter(self.tensors[0], sum(self.sizes)) if self.tensors else None

    def forward(self, x: Tensor) -> Tensor:
        return norm_parts(x, self.weight, self.eps, self.sizes)

    def weight_sources(self) -> Iterator[WeightSource]:
        yield from stacked_rows("weight", ((tensor, tensor.shard(0, 1)) for tensor in self.tensors))
