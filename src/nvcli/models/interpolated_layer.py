"""InterpolatedLayer: a decoder layer of nGPT (https://arxiv.org/abs/2410.01131). Its stream is normed before each
block, and goes on from there towards the block's normed result, at a rate for each number. Shapes: T tokens, H
hidden."""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.models.decoder_layer import DecoderLayer, LayerPlan, LayerState, LayerStep
from nvcli.models.layer_config import RATE_OF_MIXER, RATE_OF_MLP
from nvcli.models.parallel import TensorShard


class InterpolatedLayer(DecoderLayer):
    """One layer, with norms on both sides of its blocks."""

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__(plan)
        own, path = plan.build.of_own_rows(), plan.path
        self.loop = plan.config.loop
        self.mixer_rate, self.mlp_rate = (TensorShard(own, f"{path}.{name}") for name in (RATE_OF_MIXER, RATE_OF_MLP))

    def forward(self, state: LayerState, step: LayerStep) -> LayerState:
        """Compute the layer. What layers pass on is the normed stream before the first loop."""
        (_, residual, passed), (angles, batch, rows, _, before) = state, step
        assert before is None, "heads that read the residual stream are refused"
        assert self.before_attention is not None
        assert self.after_attention is not None
        assert self.before_mlp is not None
        assert self.after_mlp is not None
        assert self.mlp is not None
        x = self.before_attention(None, residual)
        assert isinstance(x, Tensor), "the stream goes on from it"
        if self.loop is not None:
            passed = x if self.loop == "first" else passed
            assert passed is not None, "the first loop comes before the others"
            x = self.before_attention(None, x + passed)
        mixed = self.mixer(x, angles, batch)
        adapters = batch.adapters_behind_attention(rows)
        if rows is not None:
            if len(rows) == 0:
                return LayerState(None, residual[rows])
            mixed, x = mixed[rows], x[rows]
        result = self.after_attention(self.mixer.o_proj(mixed, None, adapters), x)
        x = self.before_mlp(None, torch.lerp(x, result, self.mixer_rate.weight.abs().to(x.dtype)))
        result = self.after_mlp(self.mlp(x, None, adapters, self.ids_of(self.mlp, batch, rows)), x)
        return LayerState(None, torch.lerp(x, result, self.mlp_rate.weight.abs().to(x.dtype)), passed)
