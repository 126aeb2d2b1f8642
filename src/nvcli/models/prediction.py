"""Prediction: the prediction head of some models, between their last hidden states and the LM head or that of a
classifier. ClassifierHead: the latter."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from nvcli.kernels.invariant_linear import row_by_row
from nvcli.kernels.norm import rms_norm
from nvcli.kernels.plain_activation import activate
from nvcli.models.geometry import SCORE
from nvcli.models.layer_config import PREDICTION, PredictionHead
from nvcli.models.layers import Norm
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import BuildContext, TensorShards


class Prediction(TensorShards):
    """norm(activation(dense(x))), which every rank holds whole: [N, H] → [N, H]."""

    bias: nn.Parameter | None

    def __init__(self, build: BuildContext, config: PredictionHead, norm: NormConfig) -> None:
        super().__init__(build, {kind: f"{PREDICTION}.dense.{kind}" for kind in ("weight", "bias")})
        self.product, self.batch_invariant = build.product, build.batch_invariant
        self.activate = partial(activate, activation=config.activation)
        self.norm = Norm(build, f"{PREDICTION}.norm", norm)

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.product(hidden, self.weight, self.bias)
        x = row_by_row(self.activate, x) if self.batch_invariant else self.activate(x)
        norm = self.norm
        return rms_norm(x, norm.weight, norm.eps, is_centered=norm.is_centered, bias=norm.bias)


class ClassifierHead(TensorShards):
    """The numbers of a classifier's classes, which every rank computes whole: a state [H] in float32 → [L]."""

    bias: nn.Parameter | None

    def __init__(self, build: BuildContext) -> None:
        super().__init__(build, {kind: f"{SCORE}.{kind}" for kind in ("weight", "bias")})

    def forward(self, state: Tensor) -> Tensor:
        logits = torch.mv(self.weight, state)
        return logits if self.bias is None else logits + self.bias
