"""GatedDeltaNet: a layer's recurrent attention (`kernels/delta_net.py`), sharded over the ranks by key heads, and
KimiDeltaAttention: the same with a decay for each row of a state, sharded by heads.

Whichever projections a checkpoint fuses, ranks keep their rows in one order: queries, keys and values of all heads, the
output gates, then the inputs of β and the decay. Shapes: T tokens, H hidden, Hv or N heads of values of this rank, Dv
or D their size.
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
from nvcli.models.mixers.delta_net import CONVOLUTIONS, DeltaNetConfig, KimiDeltaConfig
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import (
    BuildContext,
    ColumnParallelLinear,
    LinearPiece,
    RowParallelLinear,
    TensorShard,
    linear_piece,
)
from nvcli.models.short_conv import Convolution


class GatedDeltaNet(TokenMixer):
    """A gated delta net: [T, H] → [T, Hv × Dv], the input of `o_proj`."""

    cache: StateCache

    def __init__(
        self, build: BuildContext, path: str, config: DeltaNetConfig, norm: NormConfig, cache: StateCache
    ) -> None:
        super().__init__(cache)
        size = build.group.size
        self.heads = RecurrentHeads(
            config.num_key_heads // size,
            config.key_dim,
            config.num_value_heads // size,
            config.value_dim,
            beta_scale=config.beta_scale,
        )
        pieces = _pieces_by_head(build, path, config) if config.stored == "by head" else _pieces(build, path, config)
        self.in_proj = ColumnParallelLinear(build, f"{path}.in_proj", pieces)
        convolutions = [f"{path}.{name}" for name in config.convolutions]
        if config.stored == "apart":
            self.conv = Convolution(build, convolutions)
        else:
            self.conv = Convolution(build, convolutions * 3, _parts(config, build.group.rank, size))
        # One number for each of this rank's value heads: [Hv].
        self.log_rate = TensorShard(build, f"{path}.A_log")
        self.step_bias = TensorShard(build, f"{path}.dt_bias")
        self.norm = Norm(build, f"{path}.norm", replace(norm, weight_offset=0.0, eps=config.norm_eps or norm.eps))
        self.gate = config.gate
        self.o_proj = RowParallelLinear(build, f"{path}.out_proj")

    def forward(self, x: Activations, angles: Angles, batch: ForwardBatch) -> Tensor:
        """Compute the tokens' outputs, and store the states after them; for rows with drafts, store what is needed to
        advance their states later."""
        assert isinstance(x, Tensor), "its input is not quantised"
        conv_pool, pool, rows, kept = batch.states(self.cache)
        heads, num_heads = self.heads, self.heads.num_value_heads
        projected = self.in_proj(x, batch.token_adapters)
        gate_end = heads.num_channels + num_heads * heads.value_dim
        qkv = self.conv(projected[:, : heads.num_channels], conv_pool, rows, kept)
        gates = DeltaGates(
            beta=projected[:, gate_end : gate_end + num_heads],
            step=projected[:, gate_end + num_heads :],
            log_rate=self.log_rate.weight,
            step_bias=self.step_bias.weight,
        )
        out = delta_rule(qkv, gates, pool, rows, heads, kept)
        output_gate = projected.as_strided(
            out.shape,
            (projected.stride(0), heads.value_dim, 1),
            projected.storage_offset() + heads.num_channels,
        )
        return gated_rms_norm(out, output_gate, self.norm.weight, self.norm.eps, function=self.gate).flatten(1)


def _parts(config: DeltaNetConfig, rank: int, size: int) -> tuple[slice, slice, slice]:
    """Return which rows of [queries, keys, values] of all heads belong to a rank."""
    keys, values = config.key_size // size, config.value_size // size
    first_value = 2 * config.key_size + rank * values
    return (
        slice(rank * keys, (rank + 1) * keys),
        slice(config.key_size + rank * keys, config.key_size + (rank + 1) * keys),
        slice(first_value, first_value + values),
    )


def _pieces(build: BuildContext, path: str, config: DeltaNetConfig) -> list[LinearPiece]:
    """Cut projections that the checkpoint stores separately, except for queries, keys and values."""
    names = ("q", "k", "v") if config.stored == "apart" else ("qkv",)
    pieces = [linear_piece(build, f"{path}.in_proj_{name}") for name in (*names, "z", "b", "a")]
    if config.stored == "apart":
        return pieces
    parts = _parts(config, build.group.rank, build.group.size)
    return [*(replace(pieces[0], rows=part) for part in parts), *pieces[1:]]


def _pieces_by_head(build: BuildContext, path: str, config: DeltaNetConfig) -> list[LinearPiece]:
    """Cut projections that are fused key head by key head: its query, its key, then the values and gates of its value
    heads; the inputs of β and the decay are fused likewise."""
    values = config.value_size // config.num_key_heads
    heads = config.num_value_heads // config.num_key_heads
    qkvz = _by_head(linear_piece(build, f"{path}.in_proj_qkvz"), (config.key_dim, config.key_dim, values, values))
    return qkvz + _by_head(linear_piece(build, f"{path}.in_proj_ba"), (heads, heads))


def _by_head(piece: LinearPiece, sizes: tuple[int, ...]) -> list[LinearPiece]:
    """Cut a projection that repeats parts of these sizes into pieces: all the first parts, then all the second, and so
    on."""
    pieces = []
    for number, size in enumerate(sizes):
        first = piece.rows.start + sum(sizes[:number])
        starts = range(first, piece.rows.stop, sum(sizes))
        pieces += [replace(piece, rows=slice(start, start + size)) for start in starts]
    return pieces


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
