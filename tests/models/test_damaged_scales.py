"""Scales that are NaN, infinite or of a sign that their format lacks end a load, and are named: in every format."""

from __future__ import annotations

import math
from itertools import cycle, islice
from pathlib import Path
from typing import Literal

import pytest
import torch
from rank_weights import load_model
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import edit_weights, write_tiny_model
from expert_shapes import GPT_OSS
from mxfp4 import SCALES_FILE, quantise
from nvcli.errors import LoadError
from nvcli.models.config import load_model_config
from nvcli.models.quantisation.quantisation import Quantisation
from quantised_checkpoints import FORMATS, unstack_experts, write_quantised

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
TABLES, DIVISOR = ("quant_map", "nested_quant_map"), "weight_global_scale"
SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "pre_quant_scale", "scales", "absmax", "SCB")
SCALES = (*SCALES, "nested_absmax", *TABLES, DIVISOR)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("original") / "model", **SIZES)


def quantisation_of(path: Path) -> Quantisation:
    found = load_model_config(path).quantisation
    assert found is not None
    return found


def kept_forms(quantisation: Quantisation) -> set[Literal["none", "fp8", "w4a16"]]:
    is_too_small = quantisation.numbers == "integer" and quantisation.group_size == 16
    return {"none", "fp8", "none" if is_too_small else quantisation.kept_as}


def damages(name: str, values: Tensor, quantisation: Quantisation) -> list[float]:
    """The numbers that this tensor may not hold."""
    if values.dtype == torch.uint8:
        return [255]
    bad = [math.nan, *([] if values.dtype == torch.float8_e4m3fn else [math.inf, -math.inf])]
    has_signs = quantisation.numbers == "integer" or name in TABLES
    return [*bad, *([] if has_signs else [-1.0]), *([0.0] if name == DIVISOR else [])]


def set_last(path: Path, name: str, number: float, file: str = "model.safetensors") -> None:
    edit_weights(path, lambda tensors: tensors[name].view(-1)[-1:].copy_(torch.tensor([number])), file)


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_scale_is_named(name: str, original: Path, tmp_path: Path) -> None:
    """Each number is found in some form in which weights may be kept, and in each form some number is."""
    skipped = () if name.startswith("gptq") else ("layers.1.mlp",)
    path, _ = write_quantised(original, tmp_path, FORMATS[name], skip=skipped)
    file, quantisation, num_seen = path / "model.safetensors", quantisation_of(path), 0
    whole = file.read_bytes()
    for key, values in load_file(file).items():
        last = key.rpartition(".")[2]
        are_places = last == "absmax" and values.dtype == torch.uint8
        if ".layers.0.mlp.down_proj." not in key or last not in SCALES or are_places:
            continue
        numbers, forms = damages(last, values, quantisation), sorted(kept_forms(quantisation))
        for number, form in islice(zip(cycle(numbers), cycle(forms), strict=False), max(len(numbers), len(forms))):
            file.write_bytes(whole)
            set_last(path, key, number)
            with pytest.raises(LoadError) as caught:
                load_model(path, quantization=form)
            shown = "255, an exponent" if values.dtype == torch.uint8 else f"{number}, with"
            assert str(caught.value).startswith(f"{file}: tensor {key} has a scale that is {shown}"), form
            num_seen += 1
    assert num_seen


@pytest.mark.parametrize("name", ["fp8, small blocks", "modelopt, nvfp4", "compressed, mxfp4"])
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_the_expert_with_a_damaged_scale_is_named(
    name: str, quantization: Literal["none", "fp8"], tmp_path: Path
) -> None:
    """Experts' weights are read together."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "hidden_size": 64}
    plain = unstack_experts(write_tiny_model(tmp_path / "plain", "Qwen3Moe", **sizes))
    path, _ = write_quantised(plain, tmp_path, FORMATS[name], skip=("self_attn",))
    load_model(path, quantization=quantization)
    part = next(iter(FORMATS[name].encode(torch.ones(32, 64), torch.Generator())[0].keys() & SCALES))
    key = f"model.layers.1.mlp.experts.2.up_proj.{part}"
    set_last(path, key, 255 if "mxfp4" in name else math.nan)
    with pytest.raises(LoadError, match=rf"tensor {key} has a scale that is "):
        load_model(path, quantization=quantization)


@pytest.mark.parametrize("quantization", ["none", "w4a16"])
def test_a_damaged_exponent_of_a_stack_is_named(quantization: Literal["none", "w4a16"], tmp_path: Path) -> None:
    sizes = {**GPT_OSS, "hidden_size": 64, "intermediate_size": 96}
    path = quantise(write_tiny_model(tmp_path / "model", "GptOss", **sizes))
    key = "model.layers.0.mlp.experts.down_proj_scales"
    set_last(path, key, 255, SCALES_FILE)
    with pytest.raises(LoadError, match=rf"{SCALES_FILE}: tensor {key} has a scale that is 255, an exponent"):
        load_model(path, dtype=torch.bfloat16, quantization=quantization)


@pytest.mark.parametrize(
    ("name", "part", "number"),
    [
        ("modelopt, nvfp4", "weight_scale", 0.0),
        ("fp8, small blocks", "weight_scale_inv", 0.0),
        ("bitsandbytes, fp4", "weight.absmax", 0.0),
        ("gptq", "scales", -0.5),
        ("compressed, mxfp8", "weight_scale", 254),
    ],
)
def test_scales_that_tools_write_are_read(name: str, part: str, number: float, original: Path, tmp_path: Path) -> None:
    """Blocks of zeros have a scale of 0, and AutoRound's integers scales below 0."""
    path, _ = write_quantised(original, tmp_path, FORMATS[name])
    set_last(path, f"model.layers.0.mlp.down_proj.{part}", number)
    load_model(path)
