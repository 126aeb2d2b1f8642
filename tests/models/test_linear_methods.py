"""Linear methods are chosen layer by layer, so that a checkpoint may leave some layers alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

from checkpoints import write_tiny_model
from model_driver import CPU, load_weights
from nvcli.kernels.activation import Activation
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.weight_formats import FP8Scaling
from nvcli.models import linear_methods
from nvcli.models.config import load_model_config
from nvcli.models.parallel import LinearMethod, LinearPiece, PlainLinearMethod, ShardedLinear
from nvcli.models.registry import build_model
from nvcli.models.weights import WeightSource
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup


class DoublingMethod(PlainLinearMethod):
    """Keeps each weight twice, and multiplies by their mean; the copy has a type of its own."""

    def create(self, layer: ShardedLinear) -> None:
        super().create(layer)
        layer.copy = nn.Parameter(torch.empty_like(layer.weight, dtype=torch.float64), requires_grad=False)

    def sources(self, layer: ShardedLinear) -> Iterator[WeightSource]:
        for source in super().sources(layer):
            yield source
            if source.parameter == "weight":
                yield WeightSource(tensor=source.tensor, read=source.read, parameter="copy", write=source.write)

    def apply(self, layer: ShardedLinear, x: Activations, *, with_bias: bool, out: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor)
        assert isinstance(layer.copy, Tensor)
        return torch.mm(x, ((layer.weight + layer.copy) / 2).float().t(), out=out)

    def apply_gated(
        self, layer: ShardedLinear, x: Activations, activation: Activation, scaling: FP8Scaling | None = None
    ) -> Activations:
        return LinearMethod.apply_gated(self, layer, x, activation)

    def apply_for_sum(self, layer: ShardedLinear, x: Activations, residual: Tensor | None) -> Tensor | None:
        return LinearMethod.apply_for_sum(self, layer, x, residual)


def test_methods_are_chosen_by_pieces(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model")
    seen: list[list[str]] = []

    def choose(pieces: Sequence[LinearPiece], **_: object) -> LinearMethod:
        name = pieces[0].weight.name
        seen.append([piece.weight.name for piece in pieces])
        return DoublingMethod() if ".mlp." in name and ".1." not in name else PlainLinearMethod()

    config = load_model_config(path)
    with patch.object(linear_methods, "linear_method", choose):
        model = build_model(config, TensorParallelGroup.single(), torch.float32)
    plain = build_model(config, TensorParallelGroup.single(), torch.float32)
    num_bytes, plain_bytes = load_weights(model, path, CPU), load_weights(plain, path, CPU)
    doubled = 3 * 32 * 48
    assert num_bytes == plain_bytes + 8 * doubled, "bytes are those of the parameters that are there"
    assert model.weight_bytes()["MLP"] == plain.weight_bytes()["MLP"] + 8 * doubled
    assert [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"] in seen
    assert ["model.layers.0.mlp.down_proj.weight"] in seen
    assert len(seen) == 2 * 4
    x = torch.randn(5, 32)
    for layer in ("0", "1"):
        mlp = [m.get_submodule(f"model.layers.{layer}.mlp") for m in (model, plain)]
        torch.testing.assert_close(mlp[0](x, x), mlp[1](x, x))
        kinds = {type(module.method) for module in mlp[0].modules() if isinstance(module, ShardedLinear)}
        assert kinds == {DoublingMethod if layer == "0" else PlainLinearMethod}
