"""What `quantization: auto` comes to for checkpoints in FP8: they stay in FP8 where products with them are fast."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from checkpoints import write_tiny_model
from nvcli.core.config import RunConfig
from nvcli.core.system.nvidia_smi import SmiGpu, parse_gpus
from nvcli.errors import ConfigError
from nvcli.job.run.engine_settings import load_checkpoint, resolve_engine_config, resolve_engines
from nvcli.job.run.kept_weights import explain_choice, keep_weights
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.tools.check.machine import named_gpus
from quantised_checkpoints import FORMATS, fp8_blocks, write_quantised

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kept")
    original = write_tiny_model(folder / "model", head_dim=64, **SIZES)
    blocks, _ = write_quantised(original, folder / "blocks", fp8_blocks((128, 128)))
    awq, _ = write_quantised(original, folder / "awq", FORMATS["awq"])
    w8a8, _ = write_quantised(original, folder / "w8a8", FORMATS["compressed, int8"])
    return {"plain": original, "blocks": blocks, "awq": awq, "w8a8": w8a8}


@pytest.fixture(scope="module")
def models(paths: dict[str, Path]) -> dict[str, ModelConfig]:
    return {name: load_model_config(path) for name, path in paths.items()}


def gpus_of(*capabilities: str) -> list[SmiGpu]:
    lines = [f"{i}, GPU-{i}, NVIDIA X, 580.1, 80000, 0, Disabled{one}\n" for i, one in enumerate(capabilities)]
    return list(parse_gpus("".join(lines)).values())


@pytest.mark.parametrize(
    ("name", "capabilities", "keys", "kept"),
    [
        ("blocks", [", 9.0"], {}, "fp8"),
        ("blocks", [", 8.9", ", 8.9"], {"tensor_parallel_size": 2}, "fp8"),
        ("blocks", [", 10.0"], {"quantization": "none"}, "none"),
        ("blocks", [", 8.0"], {}, "none"),
        ("blocks", [", 8.0"], {"quantization": "fp8"}, "fp8"),
        ("blocks", [", 9.0", ", 8.6"], {}, "none"),
        ("blocks", [", [N/A]"], {}, "fp8"),
        ("blocks", [""], {}, "fp8"),
        ("blocks", [], {}, "fp8"),
        ("blocks", [", 9.0"], {"tensor_parallel_size": 4}, "none"),  # blocks would be cut
        ("blocks", [", 9.0"], {"batch_invariant": True}, "none"),
        ("plain", [", 9.0"], {}, "none"),
        ("plain", [", 9.0"], {"quantization": "fp8"}, "fp8"),
        ("awq", [", 9.0"], {}, "none"),
        ("w8a8", [", 9.0"], {}, "none"),
    ],
)
def test_auto(
    name: str, capabilities: list[str], keys: dict[str, Any], kept: str, models: dict[str, ModelConfig]
) -> None:
    run = RunConfig(model="m", **keys)
    assert keep_weights(run, models[name], "cuda", gpus=gpus_of(*capabilities)).quantization == kept


def test_nothing_is_kept_on_a_cpu_or_where_layers_cannot_be_told(models: dict[str, ModelConfig]) -> None:
    run, model = RunConfig(model="m"), models["blocks"]
    assert keep_weights(run, model, "cpu", gpus=gpus_of(", 9.0")).quantization == "none"
    assert model.quantisation is not None
    unclear = dataclasses.replace(model, quantisation=dataclasses.replace(model.quantisation, left_alone=("re:(",)))
    assert keep_weights(run, unclear, "cuda", gpus=gpus_of(", 9.0")).quantization == "none"


@pytest.mark.parametrize(("kind", "kept"), [("h200", "fp8"), ("l40s", "fp8"), ("a100", "none")])
def test_what_is_kept_is_what_the_engine_gets(kind: str, kept: str, paths: dict[str, Path]) -> None:
    """`check --gpu` names GPUs that are not here."""
    run = RunConfig(model="m", device="cuda")
    path = paths["blocks"]
    model, config, *_ = resolve_engines(run, path, load_checkpoint(run, path), gpus=named_gpus(kind, None))
    assert model.quantization == config.quantization == kept
    assert config.weights_type == (f"{model.dtype}, linear layers in FP8" if kept == "fp8" else model.dtype)


@pytest.mark.parametrize(
    ("name", "device", "keys", "said"),
    [
        ("plain", "cuda", {"quantization": "fp8"}, None),
        (
            "plain",
            "cuda",
            {},
            r"is none \(auto came to it\).*: leave it out, or set `quantization` to fp8, on GPUs with",
        ),
        ("awq", "cuda", {"quantization": "w4a16"}, "is w4a16, with which nothing is multiplied in FP8.*, or set"),
        ("blocks", "cuda", {"quantization": "fp8"}, "have scales by blocks.*: leave it out$"),
        ("blocks", "cuda", {"quantization": "none"}, "have scales by blocks.*: leave it out$"),
        ("plain", "cuda", {"batch_invariant": True}, "`batch_invariant` is true.*: leave it out$"),
        ("plain", "cpu", {"quantization": "fp8"}, "a CPU adds up in float32.*: leave it out$"),
        ("plain", "cpu", {}, "a CPU adds up in float32.*: leave it out$"),
    ],
)
def test_fast_accumulation(
    name: str,
    device: Any,
    keys: dict[str, Any],
    said: str | None,
    paths: dict[str, Path],
    models: dict[str, ModelConfig],
) -> None:
    run = RunConfig(model="m", device=device, fp8_accumulation="fast", **keys)
    model = keep_weights(run, models[name], device, gpus=gpus_of(", 9.0"))
    if said is None:
        config = resolve_engine_config(run, paths[name], model)
        assert config.fp8_accumulation == "fast"
        return
    with pytest.raises(ConfigError, match=rf"`fp8_accumulation` is fast, but .*{said}"):
        resolve_engine_config(run, paths[name], model)


@pytest.mark.parametrize(
    ("name", "capability", "keys", "said"),
    [
        ("blocks", "9.0", {}, "weights stay in FP8, as the checkpoint has them; --quantization none: in "),
        ("blocks", "8.0", {}, "as the GPUs have no units for FP8 products; --quantization fp8 keeps them"),
        ("blocks", "9.0", {"tensor_parallel_size": 4}, "as they cannot be cut over 4 GPUs"),
        ("blocks", "9.0", {"batch_invariant": True}, "as batch_invariant asks for it"),
        ("blocks", "9.0", {"quantization": "fp8"}, ""),
        ("blocks", "9.0", {"device": "cpu"}, ""),
        ("w8a8", "9.0", {}, ""),
        ("plain", "9.0", {}, ""),
    ],
)
def test_what_auto_chose_is_said(
    name: str, capability: str, keys: dict[str, Any], said: str, models: dict[str, ModelConfig]
) -> None:
    run = RunConfig(model="m", **{"device": "cuda", **keys})
    model = keep_weights(run, models[name], run.device, gpus=gpus_of(f", {capability}"))  # type: ignore[arg-type]
    config = resolve_engine_config(run, Path("/m"), model)
    found = explain_choice(run, model, config)
    assert said in found
    assert bool(said) == bool(found)
