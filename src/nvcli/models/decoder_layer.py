"""DecoderLayer: one layer of a decoder, or of a head that drafts tokens. Its `LayerConfig` says which blocks it has and
where its norms are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import CacheLayer, CacheSpec
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.lora_types import AdapterRows
from nvcli.kernels.norm import sum_in_order
from nvcli.models.layer_config import SHORTCUT, LayerConfig
from nvcli.models.layer_inputs import LayerInput
from nvcli.models.layers import Angles, FeedForward, GatedInputNorm, InputNorm, ResultNorm, TokenMixer
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import BuildContext, TensorShard
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup


class LayerState(NamedTuple):
    """The values that a layer takes from the one before it: [T, H] each, or [N, H] after the last one."""

    delta: Tensor | None
    """The result that is not yet in the residual stream, as `layers.py` describes."""
    residual: Tensor
    passed: Tensor | None = None
    """The result of the layer's shortcut, like `delta` this rank's part of a sum; between several streams the shares by
    which `delta` is added to them. None: there is none."""


class LayerStep(NamedTuple):
    """The inputs of a layer in a step, beside the residual stream."""

    angles: Angles
    batch: ForwardBatch
    rows: Tensor | None
    """[N], the only tokens that continue after attention; None: all do."""
    own: Tensor | None = None
    """[T, P], an input of the layer's own."""
    before: Tensor | None = None
    """[T, H], which is filled with the stream before the layer; None: no one asks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """Settings that a layer is built by, and its parts of the KV cache."""

    build: BuildContext
    path: str
    """The beginning of its tensors' names."""
    config: LayerConfig
    norm: NormConfig
    caches: Sequence[CacheLayer[CacheSpec]]
    """Its mixers' parts of the KV cache."""
    has_input: bool = False
    """Whether it has an input in addition to the residual stream."""
    is_summed: bool = False
    """Whether the layer before it ends with a norm, so that its result is already summed over the ranks."""


class DecoderLayer(nn.Module):
    """One decoder layer. It takes and returns the residual stream as `layers.py` describes."""

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__()
        build, path, config, norm, caches = plan.build, plan.path, plan.config, plan.norm, plan.caches
        own = build.of_own_rows()
        self.group = own.group
        self.is_parallel = config.is_parallel

        norms = config.norms
        of_places = [norm] * 4 if norms.epsilons is None else [replace(norm, eps=eps) for eps in norms.epsilons]

        def before(name: str | None, of_place: NormConfig, *, is_summed: bool) -> InputNorm | None:
            if name is None:
                return None
            kind = GatedInputNorm if name in norms.gated else InputNorm
            return kind(own, f"{path}.{name}", of_place, is_summed=is_summed)

        def after(name: str | None, of_place: NormConfig, *, is_summed: bool = False) -> ResultNorm | None:
            return None if name is None else ResultNorm(own, f"{path}.{name}", of_place, is_summed=is_summed)

        self.stream_factors = norms.stream_factors
        self.adds_sum = norms.before_attention is None and not plan.is_summed
        """Whether the layer itself has to add the previous layer's result to the stream, because no norm does."""
        self.before_attention = before(norms.before_attention, of_places[0], is_summed=plan.is_summed)
        self.mixer: TokenMixer = config.mixer.build(own, path, norm, caches[0])
        self.beside: TokenMixer | None = None
        if config.beside is not None:
            self.beside = config.beside.build(own, path, norm, caches[1])
        self.after_attention = after(norms.after_attention, of_places[1])
        self.before_mlp = before(norms.before_mlp, of_places[2], is_summed=norms.after_attention is not None)

        def feed_forward(block: FeedForward) -> FeedForward:
            return RowsOfRanks(build.group, block) if build.has_own_rows else block

        self.mlp: FeedForward | None = None
        if config.mlp is not None:
            self.mlp = feed_forward(config.mlp.build(build, path, norm))
        self.shortcut: FeedForward | None = None
        if config.shortcut is not None:
            self.shortcut = feed_forward(config.shortcut.build_at(build, f"{path}.{SHORTCUT}", norm))
        self.batch_invariant = build.batch_invariant
        gives_sum = self.mlp is not None and self.mlp.is_summed
        self.after_mlp = after(norms.after_mlp, of_places[3], is_summed=gives_sum)
        self.gives_stream = self.after_mlp is None or gives_sum
        # Norms quantise for the projections after them, where nothing else reads the result.
        if not self.is_parallel and self.stream_factors is None:
            readers = (
                (self.before_attention, self.mixer, self.beside),
                (self.before_mlp, self.mlp, self.shortcut),
            )
            for input_norm, block, other in readers:
                if input_norm is not None and block is not None and other is None and block.input_proj is not None:
                    input_norm.quantise_for(
                        block.input_proj, keeps_values=isinstance(block, TokenMixer) and block.reads_values
                    )
        self.input = LayerInput(build, path, norm) if plan.has_input else None
        self.scalar = TensorShard(own, f"{path}.layer_scalar") if config.has_scalar else None

    def forward(self, state: LayerState, step: LayerStep) -> LayerState:
        """Compute the layer."""
        (delta, residual, passed), (angles, batch, rows, own, before) = state, step
        if self.adds_sum and delta is not None:
            residual = self.group.add_sum(delta, residual)
            delta = None
        x = self._input_of_mixer(delta, residual, before)
        self._go_on(residual, x, 0)
        mixed = self.mixer(x, angles, batch)
        other = None if self.beside is None else self.beside(x, angles, batch)
        adapters = batch.adapters_behind_attention(rows)
        if rows is not None:
            if len(rows) == 0:
                return LayerState(None, residual[rows])
            mixed = mixed[rows]
            other = None if other is None else other[rows]
            if self.is_parallel:
                assert isinstance(x, Tensor)
                x = x[rows]
            residual = self.group.residual_rows(residual, rows)
        if self.is_parallel:
            assert self.mlp is not None
            if self.before_mlp is not None:
                assert self.before_mlp.is_centered, "all ranks have all of the stream after such norms"
                x = self.before_mlp(None, residual)
            delta = self.mlp(x, None, adapters, self.ids_of(self.mlp, batch, rows))
            return LayerState(_add_part(delta, self.mixer.o_proj.part(mixed, None, adapters)), residual)
        stream = residual if self.after_attention is None else None
        delta = self.mixer.o_proj(mixed, stream, adapters)
        if self.beside is not None and other is not None:
            if delta is None:
                delta = self.beside.o_proj(other, stream, adapters)
            else:
                delta = _add_part(delta, self.beside.o_proj.part(other, None, adapters))
        del mixed, other  # the MLP can reuse their memory
        if self.after_attention is not None:
            delta = self.after_attention(delta, residual)
        late: Tensor | None = None
        if self.mlp is not None:
            x = _input(self.before_mlp, delta, residual)
            self._go_on(residual, x, 1)
            if self.shortcut is not None:
                late = self._late(self.shortcut(x, None, adapters, self.ids_of(self.shortcut, batch, rows)))
            stream = residual if self.gives_stream else None
            delta = self.mlp(x, stream, adapters, self.ids_of(self.mlp, batch, rows))
        if passed is not None:
            passed = passed if rows is None else passed[rows]
            delta = passed if delta is None else _add_part(delta, passed)
        if self.scalar is None and self.input is None:
            return LayerState(delta if self.after_mlp is None else self.after_mlp(delta, residual), residual, late)
        assert self.after_mlp is not None, "no family has one without"
        assert delta is not None
        scalar = None if self.scalar is None else self.scalar.weight
        self.after_mlp.add(delta, residual, scalar if self.input is None else None)
        if self.input is not None:
            assert own is not None
            self.input(residual, own if rows is None else own[rows], scalar)
        return LayerState(None, residual, late)

    def _input_of_mixer(self, delta: Tensor | None, residual: Tensor, before: Tensor | None) -> Activations:
        """Compute what the mixer reads, and copy the stream before the layer to `before` if that is given."""
        x = _input(self.before_attention, delta, residual)
        if before is not None:
            if self.group.size > 1:
                x = x.clone()  # a group's result holds until its next call
            before.copy_(self.group.whole_residual(residual))
        return x

    def _go_on(self, residual: Tensor, normed: Activations, block: int) -> None:
        """Make the stream what `LayerNorms.stream_factors` says before a block: 0 the mixer, 1 the MLP."""
        if self.stream_factors is not None:
            assert isinstance(normed, Tensor), "norms quantise nothing"
            torch.mul(normed, self.stream_factors[block], out=residual)

    @staticmethod
    def ids_of(block: FeedForward, batch: ForwardBatch, rows: Tensor | None) -> Tensor | None:
        """Return the ids of a batch's tokens, or of those in `rows`, for a block that reads them."""
        if not block.reads_ids:
            return None
        return batch.input_ids if rows is None else batch.input_ids[rows]

    def _late(self, result: Tensor | None) -> Tensor:
        """Return a result that holds over other blocks: [T, H], or on a single rank its parts [P, T, H] → [T, H]."""
        assert result is not None, "nothing may be added to the stream yet"
        if result.dim() == 3:
            return sum_in_order(result) if self.batch_invariant else result.sum(dim=0)
        return result.clone() if self.group.size > 1 else result


class RowsOfRanks(FeedForward):
    """A block that ranks share, between blocks that each rank computes of its own rows alone: [T, H] of this rank →
    `delta` [T, H], complete.

    With attention by rows (`ModelConfig.attention_dp`; SGLang's and TensorRT-LLM's "attention DP") the residual stream
    of a token is on one rank, which also has the whole weights of norms and token mixers. The other block of a layer
    stays cut over the ranks: the normed rows of all ranks are gathered, each rank computes its part for all of them,
    and the parts are summed on the rank that each row came from. All ranks have equally many rows, some of which are
    padding.
    """

    def __init__(self, group: TensorParallelGroup, block: FeedForward) -> None:
        """`block`: cut over the ranks; it does not read the residual stream."""
        super().__init__()
        assert not block.is_summed, "ModelConfig refuses it"
        self.group, self.block = group, block
        self.reads_ids = block.reads_ids

    def forward(
        self, x: Activations, residual: Tensor | None, adapters: AdapterRows | None = None, ids: Tensor | None = None
    ) -> Tensor:
        assert isinstance(x, Tensor), "nothing is quantised before it is gathered"
        ids = None if ids is None else self.group.gather_rows(ids)
        part = self.block(self.group.gather_rows(x), None, adapters, ids)
        return self.group.scatter_sum(part)


def _input(norm: InputNorm | None, delta: Tensor | None, residual: Tensor) -> Activations:
    """Compute a block's input: `delta` + `residual`, normed if there is a norm."""
    if norm is not None:
        x: Activations = norm(delta, residual)
        return x
    return residual if delta is None else residual.add_(delta)


def _add_part(delta: Tensor, part: Tensor) -> Tensor:
    """Add this rank's part [T, H] of one block's result to another's: [T, H], or float32 parts [P, T, H]."""
    (delta[0] if delta.dim() == 3 else delta).add_(part)
    return delta
