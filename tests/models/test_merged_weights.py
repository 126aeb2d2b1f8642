"""Adapters merged into the weights in turn: the parameters are always those of a model that is loaded with the adapter,
bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from rank_weights import load_model
from safetensors.torch import load_file, save_file

from adapters import LINEAR, PREFIX, low_rank, magnitudes, write_adapter
from checkpoints import write_tiny_model
from expert_shapes import EXPERT_SHAPES
from model_driver import CPU, load_weights
from nvcli.models import merged_weights
from nvcli.models.adapters.adapter import read_adapter
from nvcli.models.causal_lm import CausalLM
from nvcli.models.config import load_model_config
from nvcli.models.merged_weights import MergedWeights
from nvcli.models.registry import build_model
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
Kept = Literal["none", "fp8"]


def write_adapters(base: Path, folder: Path) -> list[Path]:
    """Adapters of linear layers alone, with DoRA, and with a head of its own beside an embedding whose rows change."""
    plain, some, dora = (low_rank(base, LINEAR[number:], seed=number) for number in (0, 4, 2))
    hidden = load_model_config(base).hidden_size
    head = {f"{PREFIX}lm_head.weight": torch.randn(97, hidden)}
    head[f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"] = torch.randn(2, hidden)
    keys: dict[str, Any] = {"modules_to_save": ["lm_head"], "trainable_token_indices": {"embed_tokens": [3, 5]}}
    return [
        write_adapter(folder / "plain", plain),
        write_adapter(folder / "some", some),
        write_adapter(folder / "dora", {**dora, **magnitudes(dora)}, use_dora=True),
        write_adapter(folder / "head", {**some, **head}, **keys),
    ]


def load_base(
    path: Path, folders: list[Path], *, rank: int, size: int, dtype: torch.dtype, kept: Kept
) -> tuple[CausalLM, MergedWeights]:
    """The base model of a rank that merges these adapters, and its weights."""
    config = load_model_config(path)
    adapters = {number: read_adapter(folder, config) for number, folder in enumerate(folders, 1)}
    unties = [adapter for adapter in adapters.values() if adapter.unties_head]
    for adapter in unties:
        config = adapter.adapt(config)
    group = TensorParallelGroup.single()
    group.rank, group.size = rank, size
    model = build_model(config.with_quantization(kept), group, dtype)
    load_weights(model, path, CPU, has_own_head=bool(unties))
    return model, MergedWeights(model, path, adapters, max_host_bytes=1 << 20)


def assert_equal(found: CausalLM, expected: CausalLM) -> None:
    others = dict(expected.named_parameters())
    for name, parameter in found.named_parameters():
        other = others.get(name, others["model.embed_tokens.weight"])  # the head of a model that ties it
        assert torch.equal(parameter.view(torch.uint8), other.view(torch.uint8)), name


@pytest.mark.parametrize("place", ["device", "files"])
@pytest.mark.parametrize(
    ("rank", "size", "dtype", "kept", "is_tied"),
    [
        (0, 1, torch.float32, "none", True),
        (1, 2, torch.float32, "none", False),
        (0, 1, torch.bfloat16, "none", False),
        (0, 1, torch.float32, "fp8", True),
    ],
)
def test_weights_are_those_that_the_loader_makes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    rank: int,
    size: int,
    dtype: torch.dtype,
    kept: Kept,
    is_tied: bool,
) -> None:
    """Whatever was merged before, and the base weights again at the end."""
    monkeypatch.setattr(merged_weights, "_HOST_SHARE", 0.0 if place == "files" else 0.5)
    base = write_tiny_model(tmp_path / "base", "Llama", tie_word_embeddings=is_tied, **SIZES)
    folders = write_adapters(base, tmp_path)
    with torch.inference_mode():
        model, weights = load_base(base, folders, rank=rank, size=size, dtype=dtype, kept=kept)
        assert weights.place == place or dtype == torch.bfloat16, "of rounded weights there is nothing to keep"
        assert ("another type" in weights.note) == (dtype == torch.bfloat16)
        for number in (1, 2, 4, 3, 1, 0, 4, 0):
            assert weights.merge(number) is None
            lora = folders[number - 1] if number else None
            assert_equal(model, load_model(base, rank, size, dtype=dtype, quantization=kept, lora=lora))


def test_experts(tmp_path: Path) -> None:
    family, shape = EXPERT_SHAPES["qwen3 moe"]
    base = write_tiny_model(tmp_path / "base", family, **shape)
    folders = [write_adapter(tmp_path / str(seed), low_rank(base, LINEAR, seed=seed)) for seed in range(2)]
    with torch.inference_mode():
        model, weights = load_base(base, folders, rank=1, size=2, dtype=torch.float32, kept="none")
        for number in (2, 1, 0):
            assert weights.merge(number) is None
            assert_equal(model, load_model(base, 1, 2, lora=folders[number - 1] if number else None))


def test_an_adapter_that_cannot_be_read_spoils_its_own_rows_alone(tmp_path: Path) -> None:
    base = write_tiny_model(tmp_path / "base", "Llama")
    folders = [write_adapter(tmp_path / str(seed), low_rank(base, LINEAR, seed=seed)) for seed in range(2)]
    file = folders[0] / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values()))[0, 0] = math.inf
    save_file(tensors, file)
    with torch.inference_mode():
        model, weights = load_base(base, folders, rank=0, size=1, dtype=torch.float32, kept="none")
        problem = weights.merge(1)
        assert problem is not None
        assert "has values that are NaN or infinite" in str(problem)
        assert all(parameter.isnan().all() for name, parameter in model.named_parameters() if "proj" in name)
        for number in (2, 0):
            assert weights.merge(number) is None
            assert_equal(model, load_model(base, lora=folders[number - 1] if number else None))
