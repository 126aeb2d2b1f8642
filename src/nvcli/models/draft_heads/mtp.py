"""MTPHead: multi-token prediction as in DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.2) and Qwen3-Next.

The embedding of a token and the state before it are normed, concatenated and projected to the hidden size; a decoder
layer and a norm follow. Transformers' `MtpLayer` and vLLM's `qwen3_next_mtp.py` compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import CacheLayer, CacheSpec
from nvcli.models.decoder_layer import DecoderLayer, LayerPlan, LayerState, LayerStep
from nvcli.models.draft_heads.head import DraftHead, SharedParts
from nvcli.models.layers import InputNorm
from nvcli.models.mtp_config import FC, LAYER, NORM, NORM_OF_EMBEDDING, NORM_OF_HIDDEN, MTPConfig
from nvcli.models.parallel import BuildContext, TensorShard


class MTPHead(DraftHead):
    """The head's layer, with the embedding and the LM head of the target."""

    def __init__(
        self, build: BuildContext, config: MTPConfig, shared: SharedParts, caches: Sequence[CacheLayer[CacheSpec]]
    ) -> None:
        super().__init__()
        self._shared = shared
        self.group = build.group
        self.product = build.product
        self.norm_of_embedding = InputNorm(build, NORM_OF_EMBEDDING, config.norm)
        self.norm_of_hidden = InputNorm(build, NORM_OF_HIDDEN, config.norm)
        self.fc = TensorShard(build, f"{FC}.weight")
        plan = LayerPlan(build=build, path=LAYER, config=config.layer, norm=config.norm, caches=caches)
        self.layer = DecoderLayer(plan)
        is_summed = config.layer.norms.after_mlp is not None
        self.norm = InputNorm(build, NORM, config.norm, is_summed=is_summed)

    def forward(
        self, token_ids: Tensor, states: Tensor, batch: ForwardBatch, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        embeddings = self._shared.embed(token_ids, batch.images)
        parts = self.norm_of_embedding(None, embeddings), self.norm_of_hidden(None, states)
        residual = self.product(torch.cat(parts, dim=1), self.fc.weight)
        delta, residual, _ = self.layer(LayerState(None, residual), LayerStep(self._shared.angles(batch), batch, rows))
        hidden: Tensor = self.norm(delta, residual)
        if self.group.size > 1:
            hidden = hidden.clone()  # it holds until the next sum
        return hidden, hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._shared.compute_logits(hidden)
