"""AltUpLayer: a decoder layer that changes one of several residual streams, and guesses the changes of the others
(`altup_config.py`). Plain torch.

The residual of a token is all its streams, [T, N × H]. Every rank computes all of them. Shapes: T tokens, N streams, H
hidden.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvcli.kernels.norm import rms_norm
from nvcli.models.altup_config import FROM_STREAMS, TO_STREAMS, AltUpConfig
from nvcli.models.decoder_layer import DecoderLayer, LayerPlan, LayerState, LayerStep
from nvcli.models.layer_inputs import ReplicatedLinear
from nvcli.models.layers import InputNorm, Norm
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import BuildContext, TensorShards

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
        self.router_norm = Norm(build, f"{path}.router_norm", norm)
        self.router = ReplicatedLinear(build, f"{path}.modality_router")

    def predict(self, streams: Tensor) -> Tensor:
        """Mix the streams with each other: [T, N, H] → [T, N, H]."""
        shares = F.linear(self._route(streams[:, 0].contiguous()), self.prediction)
        shares = shares.view(-1, self.count, self.count).to(streams.dtype)
        return torch.baddbmm(streams, shares, streams)

    def correct(self, predicted: Tensor, changed: Tensor) -> Tensor:
        """Add the change of the first stream to all, with a share of each: [T, N, H] and the first one as the layer has
        changed it, [T, H] → [T, N, H]."""
        shares = F.linear(self._route(changed), self.correction).add_(1.0).to(changed.dtype)
        change = changed - predicted[:, 0]
        return torch.addcmul(predicted, shares.unsqueeze(2), change.unsqueeze(1))

    def _route(self, x: Tensor) -> Tensor:
        """Return numbers from -1 to 1 by which shares are made: [T, H] → [T, N] float32."""
        normed = rms_norm(x, self.router_norm.weight, self.router_norm.eps) * x.shape[-1] ** -1.0
        return torch.tanh(self.router(normed).float())


class AltUpLayer(DecoderLayer):
    """One layer, with norms on both sides of its blocks, a product of low rank beside the mixer, and an input of its
    own, which all streams but the first one take."""

    def __init__(self, altup: AltUpConfig, plan: LayerPlan) -> None:
        super().__init__(plan)
        build, path, norm = plan.build, plan.path, plan.norm
        self.count = altup.count
        self.altup = StreamCoefficients(build, f"{path}.altup", altup, norm)
        self.left, self.right = (ReplicatedLinear(build, f"{path}.laurel.linear_{side}") for side in ("left", "right"))
        self.laurel_norm = Norm(build, f"{path}.laurel.post_laurel_norm", norm)

    def forward(self, state: LayerState, step: LayerStep) -> LayerState:
        """Compute the layer, and add all to the streams [T, N × H]."""
        angles, batch, rows, own, before = step
        assert state.delta is None, "the layer before adds its result"
        assert before is None, "heads that read the residual stream are refused"
        assert self.before_attention is not None
        assert self.after_attention is not None
        assert self.before_mlp is not None
        assert self.after_mlp is not None
        assert self.mlp is not None
        assert self.input is not None
        assert own is not None
        residual = state.residual
        predicted = self.altup.predict(residual.view(len(residual), self.count, -1))
        first = predicted[:, 0].contiguous()
        x = rms_norm(first, self.before_attention.weight, self.before_attention.eps)
        mixed = self.mixer(x, angles, batch)
        adapters = batch.adapters_behind_attention(rows)
        if rows is not None:
            if len(rows) == 0:
                return LayerState(None, residual[rows])
            mixed, predicted, first, x, own = mixed[rows], predicted[rows], first[rows], x[rows], own[rows]
        low_rank = rms_norm(self.right(self.left(x)), self.laurel_norm.weight, self.laurel_norm.eps)
        result = self.mixer.o_proj(mixed, None, adapters)
        hidden = (first + self.after_attention(result, first) + x + low_rank) * 2.0**-0.5
        result = self.mlp(self.before_mlp(None, hidden), None, adapters, self.ids_of(self.mlp, batch, rows))
        self.after_mlp.add(result, hidden, None)
        streams = self.altup.correct(predicted, hidden)
        streams[:, 1:].add_(self.input.normed(streams[:, 0] * self.altup.scale, own).unsqueeze(1))
        return LayerState(None, streams.flatten(1))


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
        return rms_norm(self.stack(first, others).mean(dim=0), norm.weight, norm.eps)
