"""Sizes that are said without building a model are those of the model that is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import write_tiny_qwen3
from nvcli.bench.shapes import write_shape
from nvcli.distributed.stage import WHOLE, Stage
from nvcli.distributed.tensor_parallel import TensorParallelGroup
from nvcli.models.config import load_model_config
from nvcli.models.registry import build_model
from nvcli.runner.memory import weight_groups
from nvcli.sizing.weights import kv_bytes_per_token, weight_elements


def group_of(rank: int, size: int) -> TensorParallelGroup:
    group = TensorParallelGroup.single()
    group.rank, group.size = rank, size
    return group


def built(path: Path, tp: int, rank: int, stage: Stage = WHOLE) -> tuple[dict[str, int], int]:
    model = build_model(load_model_config(path), group_of(rank, tp), torch.bfloat16, stage=stage)
    specs = model.attention_specs
    kv_bytes = sum(2 * spec.num_kv_heads * spec.head_dim * 2 for spec in specs)
    return {name: size // 2 for name, size in weight_groups(model).items()}, kv_bytes


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-14b"])
def test_known_shapes(name: str, tp: int, tmp_path: Path) -> None:
    path = write_shape(name, tmp_path)
    model = load_model_config(path)
    elements, kv_bytes = built(path, tp, rank=tp - 1)
    assert weight_elements(model, tensor_parallel_size=tp) == elements
    assert kv_bytes_per_token(model, tensor_parallel_size=tp, bytes_per_element=2) == kv_bytes


@pytest.mark.parametrize(
    "changes",
    [{"attention_bias": True}, {"tie_word_embeddings": True}, {"num_key_value_heads": 2, "vocab_size": 101}],
)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_biases_ties_shared_heads_and_padding(changes: dict[str, Any], tp: int, tmp_path: Path) -> None:
    shape = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
    path = write_tiny_qwen3(tmp_path / "tiny", **{**shape, **changes})
    model = load_model_config(path)
    elements, kv_bytes = built(path, tp, rank=0)
    assert weight_elements(model, tensor_parallel_size=tp) == elements
    assert kv_bytes_per_token(model, tensor_parallel_size=tp, bytes_per_element=2) == kv_bytes


@pytest.mark.parametrize("is_tied", [False, True])
def test_stages(is_tied: bool, tmp_path: Path) -> None:
    path = write_tiny_qwen3(tmp_path / "tiny", num_hidden_layers=5, tie_word_embeddings=is_tied)
    model = load_model_config(path)
    for number in range(3):
        stage = Stage(number, 3)
        elements, kv_bytes = built(path, 2, rank=0, stage=stage)
        assert weight_elements(model, tensor_parallel_size=2, stage=stage) == elements
        assert kv_bytes_per_token(model, tensor_parallel_size=2, bytes_per_element=2, stage=stage) == kv_bytes


@pytest.mark.parametrize(("name", "billions"), [("qwen3-0.6b", 0.60), ("qwen3-8b", 8.19), ("qwen3-32b", 32.76)])
def test_published_sizes(name: str, billions: float, tmp_path: Path) -> None:
    elements = weight_elements(load_model_config(write_shape(name, tmp_path)))
    assert sum(elements.values()) / 1e9 == pytest.approx(billions, abs=0.005)
