"""StreamLayer: a decoder layer between residual streams that run side by side (`kernels/streams.py`), and the two ways
by which its blocks read and change them: shares, and gates of low rank.

The residual of a token is all its streams, [T, N × H]. A layer's last result is added to them by the next layer, with
the shares that it passes on. Every rank computes all shares. Shapes: T tokens, N streams, H hidden.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from nvcli.kernels.norm import rms_norm
from nvcli.kernels.stream_settings import StreamSettings
from nvcli.kernels.streams import ShareWeights, add_to_streams, gate_streams, norm_streams, read_streams
from nvcli.models.decoder_layer import DecoderLayer, LayerPlan, LayerState, LayerStep
from nvcli.models.layer_config import (
    FROM_STREAM_GATES,
    RESULT_SHARES,
    STREAMS_OF_MIXER,
    STREAMS_OF_MLP,
    TO_STREAM_GATES,
)
from nvcli.models.layers import InputNorm
from nvcli.models.ngram_lookup import NGramLookup
from nvcli.models.parallel import BuildContext, ColumnParallelLinear, TensorShards
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup


class StreamShares(TensorShards):
    """Adds the result of the block before to the streams, and gives the normed sum of them that the next block
    reads."""

    fn: nn.Parameter
    base: nn.Parameter
    scale: nn.Parameter

    def __init__(self, build: BuildContext, path: str, settings: StreamSettings) -> None:
        super().__init__(build, {name: f"{path}.{name}" for name in ("fn", "base", "scale")})
        self.settings = settings

    def forward(self, state: LayerState, norm: InputNorm) -> tuple[Tensor, Tensor]:
        """Add the last result to the streams, and return the next block's normed input and the new shares
        (`read_streams`)."""
        delta, streams, kept = state
        assert norm.bias is None, "no family has one"
        assert not norm.is_centered, "no family has one"
        delta = None if delta is None else self.group.sum(delta)
        weights = ShareWeights(self.fn, self.base, self.scale)
        return read_streams(streams, delta, kept, weights, self.settings, norm.weight, norm.eps)


class StreamGates(nn.Module):
    """Adds the result of the block before to the streams, and gives the mean of the normed streams, through gates, that
    the next block reads."""

    def __init__(self, build: BuildContext, path: str, settings: StreamSettings) -> None:
        super().__init__()
        self.group, self.settings = build.group, settings
        names = [TO_STREAM_GATES, RESULT_SHARES]
        if f"{path}.{RESULT_SHARES}.weight" not in build.tensors:  # after the last layer
            names.pop()
        self.down = ColumnParallelLinear(build, f"{path}.down", names)
        self.up = ColumnParallelLinear(build, f"{path}.{FROM_STREAM_GATES}", (FROM_STREAM_GATES,))

    def forward(self, state: LayerState, norm: InputNorm) -> tuple[Tensor, Tensor]:
        """Return what `StreamShares.forward` returns. The norm has weights for each stream."""
        delta, streams, kept = state
        delta = None if delta is None else self.group.sum(delta)
        normed = norm_streams(streams, delta, kept, self.settings, norm.weight, norm.eps)
        products, logits = self.down(normed).tensor_split((self.settings.gate_rank,), dim=1)
        return gate_streams(normed, self.up(F.silu(products)), logits, self.settings)


def with_result(state: LayerState, group: TensorParallelGroup, settings: StreamSettings) -> Tensor:
    """Add the last result to the streams in place, if there is one, and return them: [T, N × H]."""
    delta, streams, kept = state
    if delta is not None:
        assert kept is not None
        add_to_streams(streams, group.sum(delta), kept, settings.count)
    return streams


class StreamLayer(DecoderLayer):
    """One layer, with a norm before each of its two blocks."""

    def __init__(self, settings: StreamSettings, plan: LayerPlan) -> None:
        super().__init__(plan)
        own, path = plan.build.of_own_rows(), plan.path
        self.settings = settings
        kind = StreamGates if settings.gate_rank else StreamShares
        self.attn_hc = kind(own, f"{path}.{STREAMS_OF_MIXER}", settings)
        self.ffn_hc = kind(own, f"{path}.{STREAMS_OF_MLP}", settings)
        self.lookup: NGramLookup | None = None
        if plan.config.lookup is not None:
            self.lookup = plan.config.lookup.build(plan.build, path, plan.norm, plan.caches[-1])

    def forward(self, state: LayerState, step: LayerStep) -> LayerState:
        """Compute the layer."""
        angles, batch, rows, _, before = step
        assert self.before_attention is not None
        assert self.before_mlp is not None
        assert self.mlp is not None
        assert before is None, "heads that read the residual stream are refused"
        if self.lookup is not None:
            state = LayerState(None, with_result(state, self.group, self.settings))
            self.lookup(state.residual, batch)
        x, kept = self.attn_hc(state, self.before_attention)
        mixed, residual = self.mixer(x, angles, batch), state.residual
        adapters = batch.adapters_behind_attention(rows)
        if rows is not None:
            if len(rows) == 0:
                return LayerState(None, residual[rows])
            mixed, residual, kept = mixed[rows], residual[rows], kept[rows]
        delta = self.mixer.o_proj(mixed, None, adapters)
        del mixed  # the MLP can reuse its memory
        x, kept = self.ffn_hc(LayerState(delta, residual, kept), self.before_mlp)
        return LayerState(self.mlp(x, None, adapters, self.ids_of(self.mlp, batch, rows)), residual, kept)


class StreamEnd(nn.Module):
    """The end of a stage: in the last one the normed sum or mean of the streams, and elsewhere the streams with the
    last result."""

    def __init__(self, build: BuildContext, path: str, settings: StreamSettings) -> None:
        super().__init__()
        self.group, self.settings = build.group, settings
        has_shares = build.stage.is_last and not settings.ends_with_mean
        kind = StreamGates if settings.gate_rank else StreamShares
        self.shares = kind(build, path, settings) if has_shares else None

    def forward(self, state: LayerState, norm: InputNorm | None) -> Tensor:
        """Return [T, H] in the last stage, and elsewhere the streams [T, N × H], which are overwritten. `norm`: the
        decoder's last norm, in the last stage."""
        delta, streams, _ = state
        if norm is not None and len(streams) == 0:
            return streams[:, : streams.shape[1] // self.settings.count]
        if self.shares is not None:
            assert norm is not None
            hidden: Tensor = self.shares(state, norm)[0]
            return hidden
        assert delta is not None
        streams = with_result(state, self.group, self.settings)
        if norm is None:
            return streams
        return rms_norm(streams.view(len(streams), self.settings.count, -1).mean(dim=1), norm.weight, norm.eps)
