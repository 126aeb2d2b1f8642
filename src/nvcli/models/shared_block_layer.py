"""SharedBlockLayer: a decoder layer whose attention and MLP read the stream beside the embeddings, and whose second
mixer reads what they make of both (Zamba 2, https://arxiv.org/abs/2411.15242). Shapes: T tokens, H hidden."""

from __future__ import annotations

import torch

from nvcli.models.decoder_layer import DecoderLayer, LayerPlan, LayerState, LayerStep
from nvcli.models.layer_config import NORM_OF_BESIDE, TO_BESIDE
from nvcli.models.layer_inputs import ReplicatedLinear
from nvcli.models.layers import InputNorm


class SharedBlockLayer(DecoderLayer):
    """One layer: stream + beside(norm(stream + projection(MLP(norm(mixer(norm(stream, embeddings)))))))."""

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__(plan)
        own, path = plan.build.of_own_rows(), plan.path
        self.to_beside = ReplicatedLinear(own, f"{path}.{TO_BESIDE}")
        self.before_beside = InputNorm(own, f"{path}.{NORM_OF_BESIDE}", plan.norm)

    def forward(self, state: LayerState, step: LayerStep) -> LayerState:
        """Compute the layer. `step.own` [T, H] are the embeddings."""
        (delta, residual, _), (angles, batch, rows, own, before) = state, step
        assert self.before_attention is not None
        assert self.before_mlp is not None
        assert self.beside is not None
        assert self.mlp is not None
        assert own is not None
        if delta is not None:
            residual = self.group.add_sum(delta, residual)
        if before is not None:
            before.copy_(residual)
        adapters = batch.token_adapters
        mixed = self.mixer(self.before_attention(None, torch.cat((residual, own), dim=1)), angles, batch)
        part = self.mixer.o_proj(mixed, None, adapters)
        # The norm adds what it reads to nothing: the stream goes on without it.
        part = self.mlp(self.before_mlp(part, torch.zeros_like(residual)), None, adapters)
        assert part is not None, "nothing may be added to the stream yet"
        part = part.sum(dim=0).to(residual.dtype) if part.dim() == 3 else part
        read = self.group.add_sum(self.to_beside(part), residual.clone())
        mixed = self.beside(self.before_beside(None, read), angles, batch)
        if rows is not None:
            if len(rows) == 0:
                return LayerState(None, residual[rows])
            mixed, residual = mixed[rows], self.group.residual_rows(residual, rows)
        return LayerState(self.beside.o_proj(mixed, residual, batch.adapters_behind_attention(rows)), residual)
