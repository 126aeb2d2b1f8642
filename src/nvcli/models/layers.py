"""The building blocks of decoder models. They know no requests, no device and no config but ModelConfig.

Residual stream: a block takes `delta`, this rank's part of what the block before it computed (over the ranks, and with
one rank maybe over parts of its own, it adds up), and `residual`, the stream; its first norm sums the one over the
ranks, adds it to the other (in place) and norms the result in one go. So nothing but a norm reads `delta`, and nothing
but the next norm reads `residual`; see `TensorParallelGroup.add_rms_norm`. Shapes: T tokens, H hidden, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nvcli.attention.backend import AttentionSpec
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.kernels.norm import rms_norm
from nvcli.kernels.rotary import qk_norm_rope_store
from nvcli.models.config import ModelConfig
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, Projection, RowParallelLinear
from nvcli.models.weights import WeightModule, WeightSource, whole


class RMSNorm(WeightModule):
    """Adds the ranks' `delta` to `residual` in place (None: nothing to add) and norms it. [T, H] → [T, H]."""

    def __init__(self, build: BuildContext, size: int, eps: float) -> None:
        super().__init__()
        self.group = build.group
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=build.dtype), requires_grad=False)

    def weight_sources(self, path: str) -> Iterator[WeightSource]:
        shape = tuple(self.weight.shape)
        yield WeightSource(
            tensor=f"{path}.weight", shape=shape, read=whole(shape), parameter="weight", write=whole(shape)
        )

    def forward(self, delta: Tensor | None, residual: Tensor) -> Tensor:
        if delta is None:
            return rms_norm(residual, self.weight, self.eps)
        return self.group.add_rms_norm(delta, residual, self.weight, self.eps)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) × up(x)), cut over the ranks by intermediate size. [T, H] → [T, H], this rank's part."""

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.gate_up_proj = ColumnParallelLinear(
            build,
            hidden,
            [
                Projection(name="gate_proj", out_features=intermediate),
                Projection(name="up_proj", out_features=intermediate),
            ],
        )
        self.down_proj = RowParallelLinear(build, intermediate, hidden, name="down_proj")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj.gated(x))
        return out


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, cut over the ranks by heads. [T, H] → [T, H], this rank's part.

    With fewer KV heads than ranks, neighbouring ranks hold the same KV head.
    """

    def __init__(self, config: ModelConfig, build: BuildContext, layer: int, *, qk_norm: bool) -> None:
        super().__init__()
        tp, head_dim = build.group.size, config.head_dim
        kv_shards = min(tp, config.num_kv_heads)
        self.layer = layer
        self.spec = AttentionSpec(
            num_heads=config.num_heads // tp,
            num_kv_heads=config.num_kv_heads // kv_shards,
            head_dim=head_dim,
            scale=head_dim**-0.5,
        )
        kv_size = config.num_kv_heads * head_dim
        self.qkv_proj = ColumnParallelLinear(
            build,
            config.hidden_size,
            [
                Projection(name="q_proj", out_features=config.num_heads * head_dim),
                Projection(name="k_proj", out_features=kv_size, num_shards=kv_shards),
                Projection(name="v_proj", out_features=kv_size, num_shards=kv_shards),
            ],
            bias=config.attention_bias,
        )
        self.o_proj = RowParallelLinear(
            build,
            config.num_heads * head_dim,
            config.hidden_size,
            name="o_proj",
            bias=config.attention_bias,
        )
        self.eps = config.rms_norm_eps
        self.q_norm = RMSNorm(build, head_dim, self.eps) if qk_norm else None
        self.k_norm = RMSNorm(build, head_dim, self.eps) if qk_norm else None

    def forward(self, x: Tensor, cos_sin: Tensor, batch: ForwardBatch) -> Tensor:
        k_cache, v_cache = batch.kv_cache.layer(self.layer)
        q, k, v = qk_norm_rope_store(
            self.qkv_proj(x),
            cos_sin,
            k_cache,
            v_cache,
            batch.slot_mapping[self.spec.kv_group],
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            q_weight=None if self.q_norm is None else self.q_norm.weight,
            k_weight=None if self.k_norm is None else self.k_norm.weight,
            eps=self.eps,
        )
        attended = batch.backend.forward(self.spec, self.layer, q, k, v, batch)  # [T, heads, D]
        out: Tensor = self.o_proj(attended.flatten(1))
        return out
