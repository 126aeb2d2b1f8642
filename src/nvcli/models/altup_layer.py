"""AltUpLayer: a decoder layer that changes one of several residual streams, and guesses the changes of the others
(`altup_config.py`).

The residual of a token is all its streams, [T, N × H]. Every rank computes all of them. Shapes: T tokens, N streams, H
hidden.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nvcli.kernels.altup import StreamRouter, corrected_shares, guessed_shares
from nvcli.kernels.norm import add_normed, rms_norm
from nvcli.kernels.streams import add_to_streams
from nvcli.models.altup_config import FROM_STREAMS, TO_STREAMS, AltUpConfig
from nvcli.models.decoder_layer import DecoderLayer, LayerPlan, LayerState, LayerStep
from nvcli.models.layer_inputs import ReplicatedLinear
from nvcli.models.layers import InputNorm, Norm
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import BuildContext, TensorShard, TensorShards

_LEAST_MEAN_SQUARE = 1e-5
"""Streams that are projected have at least this mean square when their size is changed."""


class StreamCoefficients(TensorShards):
    """How the streams are mixed before a layer and changed after it, by what a router says of one stream."""

    prediction: nn.Parameter
    correction: nn.Parameter
    scale: nn.Parameter

    def __init__(self, build: BuildContext, path: str, config: AltUpConfig, norm: NormConfig) -> None:
        names = {"prediction": "prediction_coefs.weight", "correction": "correction_coefs.weight"}
        names["scale"] = "correct_output_scale"
        super().__init__(build, {parameter: f"{path}.{name}" for parameter, name in names.items()})
        self.count = config.count
        self.norm = Norm(build, f"{path}.router_norm", norm)
        self.router = TensorShard(build, f"{path}.modality_router.weight")

    def predict(self, streams: Tensor, addend: Tensor) -> None:
        """Add `addend` [T, H] to all streams [T, N × H] but the first one, and mix them with each other, in place."""
        shares = guessed_shares(streams[:, : addend.shape[1]], self._router(), self.prediction)
        add_to_streams(streams, addend, shares, self.count)

    def correct(self, streams: Tensor, changed: Tensor) -> None:
        """Add the change of the first stream to all [T, N × H] in place, with a share of each. `changed`: the first one
        as the layer has changed it, [T, H]."""
        add_to_streams(streams, changed, corrected_shares(changed, self._router(), self.correction), self.count)

    def _router(self) -> StreamRouter:
        return StreamRouter(self.router.weight, self.norm.weight, self.norm.eps)


class AltUpLayer(DecoderLayer):
    """One layer, with norms on both sides of its blocks, a product of low rank beside the mixer, and an input of its
    own, which all streams but the first one take."""

    def __init__(self, altup: AltUpConfig, plan: LayerPlan) -> None:
        super().__init__(plan)
        build, path, norm = plan.build, plan.path, plan.norm
        self.size = build.hidden_size
        self.altup = StreamCoefficients(build, f"{path}.altup", altup, norm)
        self.left, self.right = (ReplicatedLinear(build, f"{path}.laurel.linear_{side}") for side in ("left", "right"))
        self.laurel_norm = Norm(build, f"{path}.laurel.post_laurel_norm", norm)

    def forward(self, state: LayerState, step: LayerStep) -> LayerState:
        """Compute the layer, which changes the streams [T, N × H] in place. Its `delta` is still to be added to all but
        the first."""
        angles, batch, rows, own, before = step
        assert before is None, "heads that read the residual stream are refused"
        assert self.before_attention is not None
        assert self.after_attention is not None
        assert self.before_mlp is not None
        assert self.after_mlp is not None
        assert self.mlp is not None
        assert self.input is not None
        assert own is not None
        streams = state.residual
        addend = torch.zeros_like(streams[:, : self.size]) if state.delta is None else state.delta
        self.altup.predict(streams, addend)
        x = rms_norm(streams[:, : self.size], self.before_attention.weight, self.before_attention.eps)
        mixed = self.mixer(x, angles, batch)
        adapters = batch.adapters_behind_attention(rows)
        if rows is not None:
            if len(rows) == 0:
                return LayerState(None, streams[rows])
            mixed, streams, x, own = mixed[rows], streams[rows], x[rows], own[rows]
        hidden = streams[:, : self.size] + x
        self.after_attention.add(self.mixer.o_proj(mixed, None, adapters), hidden, None)
        add_normed(self.right(self.left(x)), hidden, self.laurel_norm.weight, self.laurel_norm.eps)
        hidden.mul_(2.0**-0.5)
        result = self.mlp(self.before_mlp(None, hidden), None, adapters, self.ids_of(self.mlp, batch, rows))
        self.after_mlp.add(result, hidden, None)
        self.altup.correct(streams, hidden)
        gating = streams[:, : self.size] * self.altup.scale
        return LayerState(self.input.normed(gating, own), streams)


class ProjectedStreams(nn.Module):
    """Vectors, and N - 1 projections of them or of others, which get the size of the first vectors."""

    def __init__(self, build: BuildContext, name: str, config: AltUpConfig) -> None:
        """`name`: that of the projections."""
        super().__init__()
        self.projections = nn.ModuleList(ReplicatedLinear(build, f"{name}.{number}") for number in config.numbers)

    def stack(self, first: Tensor, others: Iterable[Tensor]) -> Tensor:
        """Stack `first` [T, H] and the projections of `others`, [T, H] each: [N, T, H]."""
        size = first.float().square().mean(-1, keepdim=True).sqrt()
        streams = [first]
        for projection, x in zip(self.projections, others, strict=True):
            projected: Tensor = projection(x)
            mean_square = projected.float().square().mean(-1, keepdim=True).clamp_(min=_LEAST_MEAN_SQUARE)
            streams.append((projected * (size * mean_square.rsqrt())).to(first.dtype))
        return torch.stack(streams)


class AltUpStart(ProjectedStreams):
    """Embeddings [T, H] → streams [T, N × H]."""

    def __init__(self, build: BuildContext, config: AltUpConfig) -> None:
        super().__init__(build, TO_STREAMS, config)

    def forward(self, embeddings: Tensor) -> Tensor:
        streams = self.stack(embeddings, [embeddings] * len(self.projections))
        return streams.transpose(0, 1).flatten(1)


class AltUpEnd(ProjectedStreams):
    """Streams [T, N × H] → the norm of their mean [T, H]."""

    def __init__(self, build: BuildContext, config: AltUpConfig) -> None:
        super().__init__(build, FROM_STREAMS, config)

    def forward(self, state: LayerState, norm: InputNorm | None) -> Tensor:
        """The arguments are those of `StreamEnd.forward`."""
        assert norm is not None, "the first stage is the last one"
        first, *others = state.residual.chunk(len(self.projections) + 1, dim=1)
        if state.delta is not None:
            others = [other + state.delta for other in others]
        return rms_norm(self.stack(first, others).mean(dim=0), norm.weight, norm.eps)
