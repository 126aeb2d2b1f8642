"""A mixture of experts beside an MLP: two sums over the ranks in one block, and what its tensors are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import edit_weights, write_tiny_model
from expert_shapes import EXPERT_SHAPES
from nvcli.errors import LoadError
from nvcli.kernels.norm import rms_norm
from nvcli.models.checkpoint_check import check_tensors, read_model_tensors
from nvcli.models.config import load_model_config
from nvcli.models.loader import init_random_weights
from nvcli.models.registry import build_model
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, settings = EXPERT_SHAPES["gemma 4 with vision, experts beside an mlp"]
    return write_tiny_model(tmp_path_factory.mktemp("gemma") / "model", family, **settings)


class _OneBuffer(TensorParallelGroup):
    """The first of two ranks, the other of which has zeros. Like sums through memory of peers, the norm of a sum holds
    until the next one, if `is_kept_short`."""

    def __init__(self, *, is_kept_short: bool) -> None:
        super().__init__(None, torch.device("cpu"))
        self.size, self.is_kept_short = 2, is_kept_short
        self.buffer = torch.empty(7, 32)

    def sum_rms_norm(self, part: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        assert part.dim() == 2
        normed = rms_norm(part, weight, eps)
        return self.buffer.copy_(normed) if self.is_kept_short else normed


def test_one_result_outlives_the_sum_of_the_other(checkpoint: Path) -> None:
    results, x = [], torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    for is_kept_short in (False, True):
        model = build_model(load_model_config(checkpoint), _OneBuffer(is_kept_short=is_kept_short), torch.float32)
        init_random_weights(model, torch.device("cpu"))
        block: Any = model.get_submodule("model.layers.0.mlp")
        results.append(block(x, x.clone()))
    assert torch.equal(*results)


def test_missing_and_unknown_tensors_are_named(checkpoint: Path) -> None:
    config = load_model_config(checkpoint)
    path = "model.language_model.layers.1."

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{path}router.per_expert_scale"]

    edit_weights(checkpoint, change)
    with pytest.raises(LoadError, match=r"missing.*layers\.1\..*per_expert_scale"):
        check_tensors(config, read_model_tensors(config, checkpoint).tensors, checkpoint)
    edit_weights(
        checkpoint,
        lambda tensors: tensors.update(
            {f"{path}router.per_expert_scale": torch.ones(6), f"{path}router.bias": torch.ones(6)}
        ),
    )
    with pytest.raises(LoadError, match=r"unknown.*router\.bias"):
        check_tensors(config, read_model_tensors(config, checkpoint).tensors, checkpoint)
