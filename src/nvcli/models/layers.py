"""The building blocks of decoder models. They know nothing of requests or devices; shapes come from the model's
tensors.

Residual stream: a block takes `delta`, this rank's part of the previous block's output, and `residual`, the stream. The
parts of all ranks add up to the output; on a single rank, `delta` may itself be several parts. The block's first norm
sums `delta` over the ranks, adds it to `residual` in place and norms the result, in one operation. On a single rank, a
product may also add its result to the stream and return no `delta`. So only norms read `delta`, and only norms and such
products touch `residual`; see `TensorParallelGroup.add_rms_norm`. If a norm follows the block (`ResultNorm`), it sums
the ranks' parts, and `delta` is its output, identical on all ranks. Shapes: T tokens, H hidden, D head_dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvcli.attention.forward_batch import AttentionLayer, ForwardBatch
from nvcli.attention.spec import AttentionCache, AttentionSpec, CacheLayer, CacheSpec
from nvcli.attention.whole_images import attend_both_ways
from nvcli.kernels.activation import activate_and_mul
from nvcli.kernels.distance_bias import DistanceBias
from nvcli.kernels.fp8 import norm_and_quantise
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.gates import gate_values
from nvcli.kernels.invariant_linear import invariant_linear, row_by_row
from nvcli.kernels.key_copies import copy_keys
from nvcli.kernels.linear import linear
from nvcli.kernels.lora_types import AdapterRows
from nvcli.kernels.norm import (
    add_normed,
    add_rms_norm,
    gated_rms_norm,
    norm_shared_parts,
    rms_norm,
    squares_of_parts,
)
from nvcli.kernels.rotary import norm_rope, qk_norm_rope_store
from nvcli.kernels.weight_formats import FP8Scaling
from nvcli.models.grouped_output import GroupedOutput
from nvcli.models.layer_config import FROM_GATES, TO_GATES
from nvcli.models.mixers.attention import CHANNEL_ROOTS, GATE, GATE_BIAS, RELATIVE, ROW_NORM, AttentionConfig
from nvcli.models.mixers.mixer import NormConfig, Rotation
from nvcli.models.mixers.mlp import HIDDEN_NORM, MLPConfig
from nvcli.models.parallel import (
    BuildContext,
    ColumnParallelLinear,
    LinearPiece,
    RowParallelLinear,
    TensorShard,
    TensorShards,
    linear_piece,
)
from nvcli.models.qkv import QKVPreparation, query_scale_table
from nvcli.models.relative_bias import RelativeBias
from nvcli.models.rope import LearnedAngles, RotaryTable
from nvcli.models.weights import DerivedModule


class Norm(TensorShards, DerivedModule):
    """The weight of a norm, which every rank holds whole, and its bias if it has one. Without a weight in the
    checkpoint it is all ones."""

    bias: nn.Parameter | None

    def __init__(self, build: BuildContext, path: str, config: NormConfig, *, size: int | None = None) -> None:
        """`size`: the number of features that are normed; None: those of the residual stream."""
        names = ("weight", "bias") if config.has_weight else ("bias",)
        super().__init__(build, {name: f"{path}.{name}" for name in names})
        self.eps = config.eps
        self.is_centered = config.kind == "layer"
        if not config.has_weight:
            ones = torch.ones(build.hidden_size if size is None else size, dtype=getattr(torch, build.dtype))
            self.register_buffer("weight", ones, persistent=False)

    def derive(self, device: torch.device) -> None:
        """Make a weight that the checkpoint does not have."""
        if "weight" in self._buffers:
            ones = torch.ones(self.weight.shape, dtype=self.weight.dtype, device=device)
            self.register_buffer("weight", ones, persistent=False)


class RowNorm(Norm):
    """RMSNorm over features that ranks share: [T, this rank's features], which may be overwritten → the same shape."""

    def __init__(self, build: BuildContext, path: str, config: NormConfig, num_features: int) -> None:
        """`num_features`: those of all ranks."""
        super().__init__(build, path, config, size=num_features // build.group.size)
        self.num_features = num_features

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return rms_norm(x, self.weight, self.eps)
        squares = self.group.sum_of_squares(squares_of_parts(x, (x.shape[1],)))
        norm_shared_parts(x, squares, (self.weight,), self.eps, (self.num_features,))
        return x


class InputNorm(Norm):
    """Adds `delta` to `residual` in place (None: there is nothing to add) and norms the sum. [T, H] → [T, H].

    `delta` is this rank's part of a sum, or the sum itself if `is_summed`. If the next layer multiplies in FP8, the
    result is quantised in the same kernel, unless adapters want its values and other ranks have parts of the sum.
    """

    def __init__(self, build: BuildContext, path: str, config: NormConfig, *, is_summed: bool = False) -> None:
        super().__init__(build, path, config)
        self.is_summed = is_summed
        self._scaling: FP8Scaling | None = None
        self._keeps_values = False

    def quantise_for(self, layer: ColumnParallelLinear, *, keeps_values: bool = False) -> None:
        """From now on, quantise the output as `layer` does. It is the only reader, except for readers of the values,
        which are kept for these and if the layer takes adapters."""
        self._scaling = layer.input_scaling() if self.bias is None else None
        self._keeps_values = keeps_values or layer.takes_adapters

    def forward(self, delta: Tensor | None, residual: Tensor) -> Activations:
        x = self._norm(delta, residual)
        if self.bias is not None:
            assert isinstance(x, Tensor), "`quantise_for` says so"
            x.add_(self.bias)
        return x

    def _norm(self, delta: Tensor | None, residual: Tensor) -> Activations:
        if self._scaling is not None and (delta is None or self.is_summed or self.group.size == 1):
            return norm_and_quantise(
                delta,
                residual,
                self.weight,
                self.eps,
                self._scaling,
                is_centered=self.is_centered,
                keeps_values=self._keeps_values,
            )
        if delta is None:
            return rms_norm(residual, self.weight, self.eps, is_centered=self.is_centered)
        if self.is_summed:
            return add_rms_norm(delta, residual, self.weight, self.eps, is_centered=self.is_centered)
        scaling = None if self._keeps_values else self._scaling
        return self.group.add_rms_norm(delta, residual, self.weight, self.eps, scaling, is_centered=self.is_centered)


class GatedInputNorm(InputNorm):
    """Norms as `InputNorm` does, and multiplies the result y by sigmoid(up(silu(down(y)))). It quantises nothing."""

    def __init__(self, build: BuildContext, path: str, config: NormConfig, *, is_summed: bool = False) -> None:
        super().__init__(build, path, config, is_summed=is_summed)
        self.down, self.up = (TensorShard(build, f"{path}.{name}.weight") for name in (TO_GATES, FROM_GATES))
        self.batch_invariant = build.batch_invariant

    def quantise_for(self, layer: ColumnParallelLinear, *, keeps_values: bool = False) -> None:
        """Do nothing: the gates want the values."""

    def forward(self, delta: Tensor | None, residual: Tensor) -> Activations:
        x = super().forward(delta, residual)
        assert isinstance(x, Tensor)
        gates = row_by_row(self._gates, x) if self.batch_invariant else self._gates(x)
        return gate_values(x, gates)

    def _gates(self, x: Tensor) -> Tensor:
        product = invariant_linear if self.batch_invariant else linear
        return product(F.silu(product(x, self.down.weight, None)), self.up.weight, None)


class ResultNorm(Norm):
    """Sums the ranks' parts of a block's result and norms the sum: [T, H] or parts [P, T, H] → [T, H], like `x`. If
    `is_summed`, the block returns the sum itself [T, H]."""

    def __init__(self, build: BuildContext, path: str, config: NormConfig, *, is_summed: bool = False) -> None:
        super().__init__(build, path, config)
        self.is_summed = is_summed

    def forward(self, part: Tensor, x: Tensor) -> Tensor:
        assert not self.is_centered, "no family has one"
        assert self.bias is None, "no family has one"
        if self.is_summed:
            return rms_norm(part, self.weight, self.eps)
        return self.group.sum_rms_norm(part, self.weight, self.eps, x.dtype)

    def add(self, part: Tensor, residual: Tensor, scalar: Tensor | None) -> None:
        """Norm as `forward` does, add the result to `residual` [T, H] in place, and multiply the sum by `scalar`
        [1]."""
        if self.is_summed or self.group.size == 1:
            add_normed(part, residual, self.weight, self.eps, scalar)
            return
        residual.add_(self.forward(part, residual))
        if scalar is not None:
            residual.mul_(scalar)


class LayerBlock(nn.Module, ABC):
    """A block of a layer."""

    quantised_input: ClassVar[str | None] = None
    """The name of the only product that reads the block's input, if the input may be quantised for it."""

    @property
    def input_proj(self) -> ColumnParallelLinear | None:
        """This product; None: the input is never quantised."""
        return None if self.quantised_input is None else getattr(self, self.quantised_input)


class CachedModule(nn.Module):
    """A module with a part of the KV cache."""

    spec: CacheSpec
    cache: CacheLayer[CacheSpec]

    def __init__(self, cache: CacheLayer[CacheSpec]) -> None:
        super().__init__()
        self.cache, self.spec = cache, cache.spec


class TokenMixer(CachedModule, LayerBlock):
    """The block of a layer that mixes tokens: [T, H] → [T, this rank's features], the input of `o_proj`."""

    o_proj: RowParallelLinear | GroupedOutput
    static_kv_scales: Tensor | None = None
    """[2] float32, the checkpoint's scales of all keys and all values in an FP8 cache, set when they are loaded; None:
    each token and head gets its own."""

    @property
    def reads_values(self) -> bool:
        """Whether it also reads the input's unquantised values, not only those quantised for `input_proj`."""
        return False

    @abstractmethod
    def forward(self, x: Activations, angles: Angles, batch: ForwardBatch) -> Tensor: ...


class FeedForward(LayerBlock):
    """The block of a layer that computes each token by itself: [T, H] → `delta` for `residual` [T, H]."""

    is_summed: bool = False
    """Whether it reads the residual stream itself and returns its complete output, identical on all ranks; otherwise it
    returns this rank's part of a sum, and `residual` is None if nothing may be added to the stream yet. `adapters`: the
    LoRA adapters of the tokens; `ids`: their ids [T], for blocks that read them."""
    reads_ids: bool = False

    @abstractmethod
    def forward(
        self, x: Activations, residual: Tensor | None, adapters: AdapterRows | None = None, ids: Tensor | None = None
    ) -> Tensor | None: ...


class GatedMLP(FeedForward):
    """down(activation(gate(x)) × up(x)), sharded over the ranks by intermediate size. [T, H] → `delta` for `residual`
    [T, H], which is None if nothing may be added to the stream yet."""

    quantised_input = "gate_up_proj"

    def __init__(self, build: BuildContext, path: str, config: MLPConfig, norm: NormConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.batch_invariant = build.batch_invariant
        self.gate_up_proj = ColumnParallelLinear(build, f"{path}.gate_up_proj", ("gate_proj", "up_proj"))
        self.down_proj = RowParallelLinear(build, f"{path}.down_proj")
        size = config.intermediate_size
        self.norm = RowNorm(build, f"{path}.{HIDDEN_NORM}", norm, size) if config.norms_hidden else None

    def forward(
        self, x: Activations, residual: Tensor | None, adapters: AdapterRows | None = None, ids: Tensor | None = None
    ) -> Tensor | None:
        hidden = self.hidden(x, adapters, self.down_proj.input_scaling(adapters))
        delta: Tensor | None = self.down_proj(hidden, residual, adapters)
        return delta

    def hidden(self, x: Activations, adapters: AdapterRows | None, scaling: FP8Scaling | None = None) -> Activations:
        """Compute activation(gate(x)) × up(x), [T, H] → [T, I], which may be normed, or quantised as `scaling` says."""
        if self.norm is not None:
            hidden = self._activated(x, adapters)
            assert isinstance(hidden, Tensor), "nothing asked for less"
            normed: Tensor = self.norm(hidden)
            return normed
        return self._activated(x, adapters, scaling)

    def _activated(
        self, x: Activations, adapters: AdapterRows | None, scaling: FP8Scaling | None = None
    ) -> Activations:
        if (kind := self.activation.kind) in ("silu", "gelu_tanh"):
            return self.gate_up_proj.gated(x, kind, scaling, adapters)
        activated = partial(activate_and_mul, activation=self.activation)
        gate_up = self.gate_up_proj(x, adapters)
        return row_by_row(activated, gate_up) if self.batch_invariant else activated(gate_up)


class Angles:
    """The cosines and sines of a step's tokens, for each rotation of the model."""

    def __init__(self, by_rope: Mapping[Rotation, Tensor], tables: Mapping[Rotation, Tensor]) -> None:
        """`tables`: those of all positions, of rotations whose frequencies are not learned."""
        self._by_rope, self._tables = by_rope, tables

    def of(self, rotation: Rotation | None) -> Tensor | None:
        """Return the angles of one kind of attention, [T, D] float32; None if it does not rotate."""
        return None if rotation is None else self._by_rope[rotation]

    def table(self, rotation: Rotation) -> Tensor:
        """Return the angles of all positions of one kind of attention, [positions, D] float32."""
        return self._tables[rotation]


class RotaryTables(nn.Module):
    """A stage's tables of angles, one for each rotation of its layers."""

    def __init__(self, build: BuildContext, rotations: Iterator[Rotation], axes: tuple[int, ...] = ()) -> None:
        """`axes`: those of `RotaryTable`."""
        super().__init__()
        self.keys = tuple(dict.fromkeys(rotations))
        self.tables = nn.ModuleList(
            LearnedAngles(build, rope, head_dim)
            if rope.is_learned
            else RotaryTable(rope, head_dim, build.max_positions, axes)
            for rope, head_dim in self.keys
        )

    def forward(self, positions: Tensor) -> Angles:
        of_keys = dict(zip(self.keys, self.tables, strict=True))
        fixed = {key: table.get_buffer("table") for key, table in of_keys.items() if isinstance(table, RotaryTable)}
        return Angles({key: table(positions) for key, table in of_keys.items()}, fixed)


class Attention(TokenMixer):
    """Grouped-query attention, sharded over the ranks by heads. [T, H] → [T, this rank's heads × D].

    With fewer KV heads than ranks, neighbouring ranks hold the same KV head.
    """

    cache: AttentionCache
    spec: AttentionSpec

    def __init__(
        self, build: BuildContext, path: str, config: AttentionConfig, norm: NormConfig, cache: AttentionCache
    ) -> None:
        super().__init__(cache)
        self.config = config
        self.rotation = config.rotation
        self.eps = norm.eps
        projections: tuple[str | LinearPiece, ...] = ("q_proj", "k_proj", "v_proj")
        projections = projections[: 1 if config.shares_kv else 2 if config.keys_are_values else 3]
        gate = config.gate
        if gate is not None and gate.is_in_queries:
            queries, gates = _queries_and_gates(linear_piece(build, f"{path}.q_proj"), config.head_dim)
            projections = *queries, *projections[1:], *gates
        elif config.has_wide_gate:
            projections = *projections, GATE
        if config.relative is not None:
            projections = *projections, RELATIVE
        self.qkv_proj = ColumnParallelLinear(build, f"{path}.qkv_proj", projections)
        self.o_proj = RowParallelLinear(build, f"{path}.o_proj")
        self.head_gates: ColumnParallelLinear | None = None
        if gate is not None and gate.is_of_heads:
            self.head_gates = ColumnParallelLinear(build, f"{path}.{GATE}", (GATE,))
        has_bias = gate is not None and gate.has_bias
        self.gate_bias = TensorShard(build, f"{path}.{GATE_BIAS}") if has_bias else None
        norms_heads = config.qk_norm == "head"
        size, of_head = config.head_dim, replace(norm, has_weight=config.weighs_norms)
        has_keys = not config.shares_kv
        self.q_norm = Norm(build, f"{path}.q_norm", of_head, size=size) if norms_heads else None
        self.k_norm = Norm(build, f"{path}.k_norm", of_head, size=size) if norms_heads and has_keys else None
        unweighted = replace(norm, has_weight=False)
        self.o_norm = (
            Norm(build, f"{path}.o_norm", unweighted, size=config.result_dim) if config.norms_results else None
        )
        size = config.num_heads * config.result_dim
        self.row_norm = RowNorm(build, f"{path}.{ROW_NORM}", norm, size) if config.norms_row else None
        has_roots = config.channel_factor is not None
        self.channel_roots = TensorShard(build, f"{path}.{CHANNEL_ROOTS}") if has_roots else None
        self.sinks = TensorShard(build, f"{path}.sinks") if config.has_sinks else None
        self.prepare = QKVPreparation(build, path, config, norm) if QKVPreparation.is_needed(config) else None
        self.query_scales = query_scale_table(config.query_scaling, build.max_positions)
        self.relative = None if config.relative is None else RelativeBias(build, path)

    @property
    def input_proj(self) -> ColumnParallelLinear | None:
        return self.qkv_proj if self.head_gates is None else None

    def forward(self, x: Activations, angles: Angles, batch: ForwardBatch) -> Tensor:
        """Store the tokens' keys and values, and attend: [T, H] → [T, this rank's heads × D], the input of `o_proj`."""
        k_cache, v_cache = batch.kv_cache.layer(self.cache.number)
        qkv, gates = self.split_gates(self.qkv_proj(x, batch.token_adapters))
        if self.head_gates is not None:
            gates = self.head_gates(x, batch.token_adapters)
        if gates is not None and self.gate_bias is not None:
            gates.view(len(gates), self.spec.num_heads, -1).add_(self.gate_bias.weight.unsqueeze(1))
        if self.config.shares_kv:
            return self._attend_to_cache(qkv, angles, batch)
        factors = None if self.query_scales is None else self.query_scales(batch.positions)
        bias: DistanceBias | None = None
        if self.relative is not None:
            size = self.spec.num_heads * len(self.relative.weight)
            qkv, numbers = qkv[:, :-size], qkv[:, -size:]
            bias = self.relative(numbers, factors, batch.positions)
        scales = batch.kv_cache.scales(self.cache.number)
        q, k, v = qk_norm_rope_store(
            self._prepared(qkv, batch),
            angles.of(self.rotation),
            k_cache,
            v_cache,
            batch.slot_mapping[self.spec.kv_group],
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            q_weight=None if self.q_norm is None else self.q_norm.weight,
            k_weight=None if self.k_norm is None else self.k_norm.weight,
            eps=self.eps,
            keep_keys=batch.backend.reads_new_keys,
            norms_last=self.config.norms_last,
            norms_values=self.config.norms_values,
            value_factor=self.config.value_factor,
            scales=scales,
            static_scales=self.static_kv_scales,
        )
        if batch.key_copies is not None:
            copy_keys(k_cache, v_cache, scales, batch.key_copies.of_groups[self.spec.kv_group])
        if factors is not None:
            q = (q * factors).to(q.dtype)
        if self.channel_roots is not None:
            q = (q * self.channel_roots.weight.view(1, *q.shape[1:]).square()).to(q.dtype)
        attended = self._gated(self._attend(q, k, v, batch, bias), gates)
        if self.row_norm is None:
            return attended
        normed: Tensor = self.row_norm(attended)
        return normed

    def _gated(self, attended: Tensor, gates: Tensor | None) -> Tensor:
        """Multiply the result [T, this rank's heads × D] by its gates, if it has any."""
        if gates is None:
            return attended
        assert self.config.gate is not None
        if self.o_norm is not None:
            by_head = len(attended), self.spec.num_heads, self.spec.result_dim
            attended, gates = attended.view(by_head), gates.view(by_head)
            return gated_rms_norm(attended, gates, self.o_norm.weight, self.o_norm.eps, function="sigmoid").flatten(1)
        return gate_values(attended, gates, self.config.gate.function)

    def split_gates(self, projected: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split the product of queries, keys and values [T, …] from the gate of each number of the results, which may
        stand behind it."""
        if not self.config.has_wide_gate:
            return projected, None
        qkv, gates = projected.tensor_split((-self.spec.num_heads * self.spec.result_dim,), dim=1)
        return qkv, gates

    def _prepared(self, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the fused projection [T, …] as heads are stored, but for norms of heads and rotation."""
        return qkv if self.prepare is None else self.prepare(qkv)

    def _attend(
        self, q: Tensor, k: Tensor | None, v: Tensor, batch: ForwardBatch, bias: DistanceBias | None = None
    ) -> Tensor:
        """q: [T, this rank's heads, D]; k, v: as in `AttentionBackend.forward` → [T, this rank's heads × D]."""
        sinks = None if self.sinks is None else self.sinks.weight
        layer = AttentionLayer(self.spec, self.cache.number, sinks, bias)
        attended = batch.backend.forward(layer, q, k, v, batch)
        if batch.images is not None and batch.images.whole:
            groups = batch.images.whole.get((self.spec.window, self.spec.kv_group), ())
            attend_both_ways(layer, q, groups, batch, attended)
        return attended.flatten(1)

    def _attend_to_cache(self, queries: Tensor, angles: Angles, batch: ForwardBatch) -> Tensor:
        """Attend to the keys and values that another layer has stored. [T, this rank's heads × D] → the same shape."""
        q = queries.view(len(queries), self.spec.num_heads, self.spec.head_dim)
        weight = None if self.q_norm is None else self.q_norm.weight
        q = norm_rope(q, angles.of(self.rotation), weight, self.eps, norms_last=self.config.norms_last)
        k, v = None, q  # a backend that takes no keys takes no values either
        if batch.backend.reads_new_keys:
            slots = batch.slot_mapping[self.spec.kv_group]
            k_cache, v_cache = batch.kv_cache.layer(self.cache.number)
            places = slots // k_cache.shape[1], slots % k_cache.shape[1]
            k, v = k_cache[places].to(q.dtype), v_cache[places].to(q.dtype)
        return self._attend(q, k, v, batch)


def _queries_and_gates(piece: LinearPiece, head_dim: int) -> tuple[list[LinearPiece], list[LinearPiece]]:
    """Split a projection in which each head's gate follows its query. Gates multiply the attention output, whose
    dimensions keep their order."""

    def part(first: int, *, in_order: bool) -> LinearPiece:
        order = None if in_order else piece.weight.row_order
        bias = None if piece.bias is None else replace(piece.bias, row_order=order)
        weight = replace(piece.weight, row_order=order)
        return replace(piece, weight=weight, bias=bias, rows=slice(first, first + head_dim))

    heads = range(piece.rows.start, piece.rows.stop, 2 * head_dim)
    return [part(first, in_order=False) for first in heads], [part(first + head_dim, in_order=True) for first in heads]
