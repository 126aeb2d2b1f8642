"""Checkpoints of other layouts give the same model: fused or split projections, older and newer prefixes, and parts
that stay on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import edit_json, reference_model, write_tiny_model
from family_shapes import SHAPES
from model_driver import CPU, ModelDriver
from nvcli.errors import LoadError
from nvcli.models.config import load_model_config
from nvcli.tools.doctor.model_probe import check_tensors

OLDER = [
    ("pythia", "gpt_neox.", "layers.{}.attention"),
    ("gpt 2", "transformer.", "h.{}.attn"),
    ("falcon 40b", "transformer.", "h.{}.self_attention"),
]
FILE = "model.safetensors"


def parameters(path: Path) -> dict[str, Tensor]:
    return dict(ModelDriver(path).model.named_parameters())


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(path / FILE)), path / FILE, metadata={"format": "pt"})


def test_fused_and_split_projections_are_the_same(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "phi", "Phi3")
    fused = parameters(path)

    def split(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            if ".qkv_proj." in name:
                for part, rows in zip("qkv", tensor.split((64, 32, 32)), strict=True):
                    found[name.replace("qkv_proj", f"{part}_proj")] = rows.contiguous()
            elif ".gate_up_proj." in name:
                for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                    found[name.replace("gate_up_proj", f"{part}_proj")] = rows.contiguous()
            else:
                found[name] = tensor
        return found

    rewrite(path, split)
    for name, parameter in parameters(path).items():
        assert torch.equal(parameter, fused[name]), name


@pytest.mark.parametrize(("shape", "prefix", "attention"), OLDER)
def test_older_files_have_masks_and_frequencies_and_may_lack_a_prefix(
    shape: str, prefix: str, attention: str, tmp_path: Path
) -> None:
    family, overrides = SHAPES[shape]
    path = write_tiny_model(tmp_path / "model", family, **overrides)
    expected = parameters(path)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for layer in range(2):
            tensors[f"{prefix}{attention.format(layer)}.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
            tensors[f"{prefix}{attention.format(layer)}.masked_bias"] = torch.tensor(-1e9)
            tensors[f"{prefix}{attention.format(layer)}.rotary_emb.inv_freq"] = torch.ones(4)
        return tensors

    rewrite(path, change)
    for _ in range(2):
        for name, parameter in parameters(path).items():
            assert torch.equal(parameter, expected[name]), name
        rewrite(path, lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()})


def test_kimi_linear_has_names_of_its_own_and_of_transformers(tmp_path: Path) -> None:
    """`save_pretrained` gives the dense layer's MLP the name of experts, which published files have for these alone."""
    family, overrides = SHAPES["kimi linear"]
    path = write_tiny_model(tmp_path / "published", family, **overrides)
    expected = parameters(path)
    dense = "model.layers.0.block_sparse_moe."
    assert dense + "up_proj.weight" in load_file(path / FILE)
    rewrite(path, lambda found: {name.replace(dense, "model.layers.0.mlp."): one for name, one in found.items()})
    for name, parameter in parameters(path).items():
        assert torch.equal(parameter, expected[name]), name
    reference_model(path).save_pretrained(tmp_path / "own", save_original_format=False)
    names = load_file(tmp_path / "own" / FILE)
    assert {f"model.layers.1.{name}" for name in ("self_attn.conv1d.weight", "mlp.experts.down_proj")} < names.keys()
    for name, parameter in parameters(tmp_path / "own").items():
        assert torch.equal(parameter, expected[name]), name


def test_a_fused_projection_of_another_length_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "phi", "Phi3")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    rewrite(path, lambda tensors: {**tensors, name: tensors[name][:-1].contiguous()})
    with pytest.raises(LoadError, match=rf"{FILE}: tensor {name} has shape \[127, 32\].* 128 rows \(64 \+ 32 \+ 32\)"):
        ModelDriver(path)


@pytest.mark.parametrize(
    ("text", "head", "vision"),
    [
        ("language_model.model.", "language_model.lm_head.", "vision_tower."),
        ("model.language_model.", "lm_head.", "model.vision_tower."),
    ],
)
def test_older_and_newer_prefixes(text: str, head: str, vision: str, tmp_path: Path) -> None:
    path = write_tiny_model(
        tmp_path / "gemma", "Gemma3", rope_parameters=None, tie_word_embeddings=True, sliding_window=20
    )
    expected = parameters(path)

    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            _, is_text, rest = name.partition("language_model.")
            found[f"{text}{rest.removeprefix('model.')}" if is_text else f"{vision}{name}"] = tensor
        embedding = found[f"{text}embed_tokens.weight"]
        return {**found, f"{head}weight": embedding.clone(), f"{vision}patch": torch.ones(2)}

    rewrite(path, rename)
    driver = ModelDriver(path)
    for name, parameter in driver.model.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    (note,) = driver.notes
    assert "(vision_tower" in note
    assert "left on disk" in check_tensors(path).found


def test_layers_that_attend_to_images_alone_stay_on_disk(tmp_path: Path) -> None:
    """Also in lists of layers that are not quantised, those after them have other numbers."""
    family, overrides = SHAPES["llama 3.2 with vision, read as text"]
    path = write_tiny_model(tmp_path / "llama", family, **overrides)
    expected = parameters(path)
    text = json.loads((path / "config.json").read_text())
    alone = [f"language_model.model.layers.{number}.mlp.up_proj" for number in (1, 4)]
    edit_json(path / "config.json", architectures=["MllamaForConditionalGeneration"], text_config=text)
    for prefix in ("language_model.model.", "model.language_model."):

        def rename(tensors: dict[str, Tensor], prefix: str = prefix) -> dict[str, Tensor]:
            return {
                name if name.startswith("lm_head") else prefix + name.rpartition("model.")[2]: tensor
                for name, tensor in tensors.items()
            }

        rewrite(path, rename)
        driver = ModelDriver(path)
        for name, parameter in driver.model.named_parameters():
            assert torch.equal(parameter, expected[name]), name
        (note,) = driver.notes
        assert "(image_layers)" in note
    edit_json(path / "config.json", quantization_config={"quant_method": "fp8", "modules_to_not_convert": alone})
    model = load_model_config(path)
    modules = (f"model.layers.{number}.{name}" for number in range(3) for name in ("mlp.up_proj", "self_attn.q_proj"))
    assert [name for name in modules if model.leaves_alone(name)] == ["model.layers.2.mlp.up_proj"]
    for value in ([5], [True], 1, [0, 1, 2, 3, 4]):
        edit_json(path / "config.json", text_config={**text, "cross_attention_layers": value})
        with pytest.raises(LoadError, match=r"`text_config\.cross_attention_layers`: .* is not a list of some of 5"):
            load_model_config(path)


def test_a_tensor_of_the_text_part_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "gemma", "Gemma3", rope_parameters=None, tie_word_embeddings=True)
    name = "language_model.model.layers.0.mlp.extra_proj.weight"
    rewrite(path, lambda tensors: {**tensors, name: torch.ones(2)})
    with pytest.raises(LoadError, match=f"unknown to the model that config.json describes: {name}"):
        ModelDriver(path)


def test_a_model_of_text_alone_has_no_other_prefix(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "qwen")
    rewrite(path, lambda tensors: {f"language_model.{name}": tensor for name, tensor in tensors.items()})
    with pytest.raises(LoadError, match=r"missing from the checkpoint: model.*the files hold language_model"):
        ModelDriver(path)


def test_rows_stand_in_the_order_in_which_one_rotation_serves_all(tmp_path: Path) -> None:
    """Neighbouring pairs of GLM's heads stand half a head apart; half of each head is not rotated."""
    path = write_tiny_model(tmp_path / "glm", "Glm", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    stored = load_file(path / FILE)["model.layers.0.self_attn.q_proj.weight"].view(4, 16, 32)
    kept = ModelDriver(path, device=CPU).model.model.layers["0"].mixer.qkv_proj.weight[:64].view(4, 16, 32)
    order = [0, 2, 4, 6, 8, 9, 10, 11, 1, 3, 5, 7, 12, 13, 14, 15]
    assert torch.equal(kept, stored[:, order])


def test_heads_that_predict_several_tokens_stay_on_disk(tmp_path: Path) -> None:
    family, overrides = SHAPES["qwen 3.5"]
    path = write_tiny_model(tmp_path, family, **overrides)
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["mtp.fc.weight"] = torch.zeros(4, 4)
    save_file(weights, file, metadata={"format": "pt"})
    driver = ModelDriver(path, device=CPU)
    assert "1 tensors" in driver.notes[0]
    assert "(mtp)" in driver.notes[0]
