"""KimiDeltaAttention: a layer's recurrent attention (`kernels/delta_net.py`) with a decay for each row of a state,
sharded over the ranks by heads.

Shapes: T tokens, H hidden, N heads of this rank, D their size.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import StateCache
from nvcli.kernels.delta_net import delta_rule
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.norm import gated_rms_norm
from nvcli.kernels.recurrent_types import DeltaGates, RecurrentHeads
from nvcli.models.layers import Angles, Norm, TokenMixer
from nvcli.models.mixers.kimi_delta import CONVOLUTIONS, KimiDeltaConfig
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, RowParallelLinear, TensorShard
from nvcli.models.short_conv import Convolution

_QKV = "q_proj", "k_proj", "v_proj"


class KimiDeltaAttention(TokenMixer):
    """Kimi Delta Attention: [T, H] → [T, N × D], the input of `o_proj`."""

    cache: StateCache

    def __init__(
        self, build: BuildContext, path: str, config: KimiDeltaConfig, norm: NormConfig, cache: StateCache
    ) -> None:
        super().__init__(cache)
        num_heads, dim = config.num_heads // build.group.size, config.head_dim
        self.heads = RecurrentHeads(
            num_heads, dim, num_heads, dim, decays_by_channel=True, lowest_decay=config.lowest_decay
        )
        of_gates = ("f_proj", "g_proj") if config.has_whole_gates else ("f_a_proj", "g_a_proj")
        self.in_proj = ColumnParallelLinear(build, f"{path}.in_proj", (*_QKV, *of_gates, "b_proj"))
        self.gate_size = num_heads * dim if config.has_whole_gates else dim
        self.decay_proj: ColumnParallelLinear | None = None
        self.gate_proj: ColumnParallelLinear | None = None
        if not config.has_whole_gates:
            self.decay_proj = ColumnParallelLinear(build, f"{path}.f_b_proj", ("f_b_proj",))
            self.gate_proj = ColumnParallelLinear(build, f"{path}.g_b_proj", ("g_b_proj",))
        self.conv = Convolution(build, [f"{path}.{name}" for name in CONVOLUTIONS])
        self.log_rate = TensorShard(build, f"{path}.A_log")  # [N]
        self.step_bias = TensorShard(build, f"{path}.dt_bias")  # [N × D]
        self.norm = Norm(build, f"{path}.o_norm", replace(norm, weight_offset=0.0))
        self.o_proj = RowParallelLinear(build, f"{path}.o_proj")

    def forward(self, x: Activations, angles: Angles, batch: ForwardBatch) -> Tensor:
        """Compute the tokens' outputs, and store the states after them; for rows with drafts, store what is needed to
        advance their states later."""
        assert isinstance(x, Tensor), "its input is not quantised"
        conv_pool, pool, rows, kept = batch.states(self.cache)
        heads, adapters = self.heads, batch.token_adapters
        sizes = heads.num_channels, self.gate_size, self.gate_size, heads.num_value_heads
        inputs, for_decays, for_gates, beta = self.in_proj(x, adapters).split(sizes, dim=1)
        qkv = self.conv(inputs, conv_pool, rows, kept)
        gates = DeltaGates(
            beta=beta,
            step=for_decays if self.decay_proj is None else self.decay_proj(for_decays, adapters),
            log_rate=self.log_rate.weight,
            step_bias=self.step_bias.weight,
        )
        out = delta_rule(qkv, gates, pool, rows, heads, kept)
        output_gates = for_gates if self.gate_proj is None else self.gate_proj(for_gates, adapters)
        output_gates = output_gates.view_as(out)
        return gated_rms_norm(out, output_gates, self.norm.weight, self.norm.eps, function="sigmoid").flatten(1)
