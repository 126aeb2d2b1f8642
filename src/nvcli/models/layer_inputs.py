"""Inputs of each layer besides the residual stream: each token has an embedding per layer (Gemma 3n; Gemma 4 E2B, E4B).

They are computed for all layers before the first layer runs, identically on all ranks, and each layer adds its own at
its end. Shapes: T tokens, H hidden, L layers, P size of a layer's input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvcli.kernels.activation import gelu_tanh_times
from nvcli.kernels.norm import add_normed, rms_norm
from nvcli.models.geometry import LAYER_EMBEDDING
from nvcli.models.layer_config import LayerInputsConfig
from nvcli.models.layers import Norm
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import BuildContext, TensorShard, VocabParallelEmbedding


class ReplicatedLinear(TensorShard):
    """A projection that every rank holds whole: [T, in] → [T, out]."""

    def __init__(self, build: BuildContext, path: str) -> None:
        super().__init__(build, f"{path}.weight")
        self.product = build.product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)


class LayerInputs(nn.Module):
    """The inputs of all layers: ids [T] and their embeddings [T, H] → [T, L, P]. The tokens of images
    (`images`, their rows) are looked up as padding."""

    def __init__(self, build: BuildContext, config: LayerInputsConfig, norm: NormConfig, hidden_size: int) -> None:
        super().__init__()
        self.size, self.padding_id = config.size, config.padding_id
        self.known = config.vocab_size if config.lacks_ids else None
        self.embedding_scale = torch.tensor(
            config.size**0.5, dtype=getattr(torch, build.dtype), device="cpu"
        ).item()  # rounded as the embedding's own scale is
        self.projection_scale = hidden_size**-0.5
        self.embed = VocabParallelEmbedding(build, LAYER_EMBEDDING)
        self.projection = ReplicatedLinear(build, "model.per_layer_model_projection")
        self.norm = Norm(build, "model.per_layer_projection_norm", norm)

    def forward(self, ids: Tensor, embeddings: Tensor, images: Tensor | None = None) -> Tensor:
        ids = ids if images is None else ids.index_fill(0, images, self.padding_id)
        if self.known is not None:
            ids = ids.where(ids < self.known, 0)
        of_tokens = (self.embed(ids) * self.embedding_scale).view(len(ids), -1, self.size)
        projected = (self.projection(embeddings) * self.projection_scale).view(of_tokens.shape)
        inputs: Tensor = (rms_norm(projected, self.norm.weight, self.norm.eps) + of_tokens) * 2.0**-0.5
        return inputs


class LayerInput(nn.Module):
    """Adds a layer's input [T, P] to `residual` [T, H] in place, through a gate computed from the residual."""

    def __init__(self, build: BuildContext, path: str, norm: NormConfig) -> None:
        super().__init__()
        self.gate = ReplicatedLinear(build, f"{path}.per_layer_input_gate")
        self.projection = ReplicatedLinear(build, f"{path}.per_layer_projection")
        self.norm = Norm(build, f"{path}.post_per_layer_input_norm", norm)

    def forward(self, residual: Tensor, own: Tensor, scalar: Tensor | None) -> None:
        """Add the input, and multiply the sum by `scalar` [1]."""
        add_normed(self._projected(residual, own), residual, self.norm.weight, self.norm.eps, scalar)

    def normed(self, x: Tensor, own: Tensor) -> Tensor:
        """Return what is added where `x` [T, H] gates the input: [T, H]."""
        return rms_norm(self._projected(x, own), self.norm.weight, self.norm.eps)

    def _projected(self, x: Tensor, own: Tensor) -> Tensor:
        return self.projection(gelu_tanh_times(self.gate(x), own))  # type: ignore[no-any-return]
