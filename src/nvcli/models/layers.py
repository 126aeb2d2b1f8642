"""The building blocks of decoder models. They know no requests and no device; shapes come from the model's tensors.

Residual stream: a block takes `delta`, this rank's part of what the block before it computed (over the ranks, and with
one rank maybe over parts of its own, it adds up), and `residual`, the stream; its first norm sums the one over the
ranks, adds it to the other (in place) and norms the result in one go. A lone rank's product may also add itself to the
stream, and give no `delta`. So nothing but a norm reads `delta`, and nothing but a norm and such a product touches
`residual`; see `TensorParallelGroup.add_rms_norm`. Shapes: T tokens, H hidden, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import AttentionSpec
from nvcli.kernels.norm import rms_norm
from nvcli.kernels.rotary import qk_norm_rope_store
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, RowParallelLinear
from nvcli.models.weights import WeightModule, WeightSource, empty_parameter


class RMSNorm(WeightModule):
    """Adds the ranks' `delta` to `residual` in place (None: there is nothing to add) and norms it. [T, H] → [T, H]."""

    def __init__(self, build: BuildContext, path: str, eps: float) -> None:
        super().__init__()
        self.group = build.group
        self.eps = eps
        self.tensor = build.tensors[f"{path}.weight"]
        self.weight = empty_parameter(self.tensor, *self.tensor.shape)

    def weight_sources(self) -> Iterator[WeightSource]:
        everything = self.tensor.shard(0, 1)
        yield WeightSource(tensor=self.tensor, read=everything, parameter="weight", write=everything)

    def forward(self, delta: Tensor | None, residual: Tensor) -> Tensor:
        if delta is None:
            return rms_norm(residual, self.weight, self.eps)
        return self.group.add_rms_norm(delta, residual, self.weight, self.eps)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) × up(x)), cut over the ranks by intermediate size. [T, H] → `delta` for `residual` [T, H]."""

    def __init__(self, build: BuildContext, path: str) -> None:
        super().__init__()
        self.gate_up_proj = ColumnParallelLinear(build, f"{path}.gate_up_proj", ("gate_proj", "up_proj"))
        self.down_proj = RowParallelLinear(build, f"{path}.down_proj")

    def forward(self, x: Tensor, residual: Tensor) -> Tensor | None:
        delta: Tensor | None = self.down_proj(self.gate_up_proj.gated(x), residual)
        return delta


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, cut over the ranks by heads. [T, H] → [T, H], this rank's part.

    Queries and keys are normed where the model has tensors for it. With fewer KV heads than ranks, neighbouring ranks
    hold the same KV head.
    """

    def __init__(self, build: BuildContext, path: str, spec: AttentionSpec, cache_layer: int, eps: float) -> None:
        """`cache_layer` is the layer's number in the KV cache of this rank."""
        super().__init__()
        self.spec = spec
        self.cache_layer = cache_layer
        self.eps = eps
        self.qkv_proj = ColumnParallelLinear(build, f"{path}.qkv_proj", ("q_proj", "k_proj", "v_proj"))
        self.o_proj = RowParallelLinear(build, f"{path}.o_proj")
        has_norms = f"{path}.q_norm.weight" in build.tensors
        self.q_norm = RMSNorm(build, f"{path}.q_norm", eps) if has_norms else None
        self.k_norm = RMSNorm(build, f"{path}.k_norm", eps) if has_norms else None

    def forward(self, x: Tensor, cos_sin: Tensor, batch: ForwardBatch) -> Tensor:
        """Store the tokens' keys and values, and attend: [T, H] → [T, this rank's heads × D], the input of `o_proj`."""
        k_cache, v_cache = batch.kv_cache.layer(self.cache_layer)
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
            keep_keys=batch.backend.reads_new_keys,
        )
        return batch.backend.forward(self.spec, self.cache_layer, q, k, v, batch).flatten(1)
