"""A model in stages: every layer once, each stage its own weights only, and the same logits one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import RequestState, make_batch
from checkpoints import reference_logits, write_tiny_qwen3
from model_driver import CPU, ModelDriver, load_weights
from nvcli.errors import ConfigError, LoadError
from nvcli.models.config import load_model_config
from nvcli.models.registry import build_model
from nvcli.worker.distributed.stage import Stage
from nvcli.worker.distributed.tensor_parallel import StageState, TensorParallelGroup


@pytest.mark.parametrize(("num_layers", "count", "sizes"), [(4, 1, [4]), (5, 3, [2, 2, 1]), (3, 3, [1, 1, 1])])
def test_every_layer_is_in_one_stage(num_layers: int, count: int, sizes: list[int]) -> None:
    parts = [Stage(index, count).layers(num_layers) for index in range(count)]
    assert [len(part) for part in parts] == sizes
    assert [layer for part in parts for layer in part] == list(range(num_layers))


WINDOWS = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 3}
"""Of five layers the last two have a window: with three stages the first has none of them, and the last no others."""


@pytest.mark.parametrize("windows", [{}, WINDOWS], ids=["full", "windows"])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_same_logits(count: int, is_tied: bool, windows: dict[str, Any], tmp_path: Path) -> None:
    path = write_tiny_qwen3(tmp_path / "model", num_hidden_layers=5, tie_word_embeddings=is_tied, **windows)
    stages = [ModelDriver(path, stage=Stage(index, count)) for index in range(count)]
    whole = ModelDriver(path)
    assert all(stage.num_bytes < 0.75 * whole.num_bytes for stage in stages)
    if is_tied:
        assert sum(stage.num_bytes for stage in stages) == whole.num_bytes + 97 * 32 * 4
    ids = [3, 14, 15, 92, 65, 35, 89]
    requests = [RequestState() for _ in stages]
    logits: list[Tensor] = []
    for tokens in (ids[:4], *([token] for token in ids[4:])):
        state: StageState | None = None
        for request, stage in zip(requests, stages, strict=True):
            batch = make_batch([(request, tokens)], stage.kv_cache, stage.backend, stage.blocks)
            with torch.inference_mode():
                state = stage.model(batch, state)
                if stage is stages[-1]:
                    logits.append(stage.model.compute_logits(state))
            if stage is not stages[-1]:
                assert isinstance(state, StageState)
                assert state.delta is None, "one rank adds it up itself"
    torch.testing.assert_close(torch.cat(logits), reference_logits(path, ids), atol=2e-4, rtol=1e-4)


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    config = load_model_config(write_tiny_qwen3(tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size \(--pp\) is 3, and this model has 2 layers.* lower"):
        build_model(config, TensorParallelGroup.single(), torch.float32, stage=Stage(0, 3))


def test_what_is_in_no_stage_is_refused_by_all(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = write_tiny_qwen3(tmp_path / "model")
    file = path / "model.safetensors"
    save_file({**load_file(file), "model.layers.1.mlp.extra_proj.weight": torch.ones(2)}, file, {"format": "pt"})
    config, group = load_model_config(path), TensorParallelGroup.single()
    for index in range(2):
        with pytest.raises(LoadError, match="extra_proj"):
            load_weights(build_model(config, group, torch.float32, stage=Stage(index, 2)), path, CPU)
