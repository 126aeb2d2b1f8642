"""DeepSeek-V4 as it was published: names of tensors and keys of config.json, layers in FP8 blocks whose scales are
powers of 2, and experts in MXFP4. Ranks load, or keep, the numbers that these stand for."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_weights import load_model, load_parameters
from safetensors.torch import load_file, save_file
from torch import Tensor

from batches import RequestState
from checkpoints import edit_json, edit_weights, reference_logits, write_tiny_model
from expert_shapes import EXPERT_SHAPES
from model_driver import ModelDriver
from nvcli.core.config_types import KeptWeights
from nvcli.errors import LoadError
from nvcli.kernels.fp8 import dequantise_weight
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.w4 import dequantise as dequantise_words
from nvcli.kernels.weight_formats import W4Format
from nvcli.models.config import load_model_config
from quantised_checkpoints import fp4

SIZES = {
    "hidden_size": 64,
    "head_dim": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "intermediate_size": 128,
    "index_head_dim": 64,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "rope_parameters": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32},
}
NAMES = {
    r"^model\.embed_tokens\.": "embed.",
    r"^model\.hc_head\.hc_": "hc_head_",
    r"^model\.": "",
    r"\.attn\.norm\.": ".attn.kv_norm.",
}
IN_FP8 = re.compile(r"\.attn\.(indexer\.)?w[qko]\w+\.weight|\.shared_experts\.w\d\.weight")
IN_FP4 = re.compile(r"\.experts\.\d+\.w\d\.weight")
KEYS = {
    "compress_ratios": [0, 4, 128, 0],  # the last one is that of a layer for multi-token prediction
    "num_hash_layers": 1,
    "qk_rope_head_dim": 64,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 32},
    "rope_theta": 10000,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
LEFT_OUT = ("layer_types", "mlp_layer_types", "rope_parameters", "partial_rotary_factor", "compress_rates", "dtype")


def _powers(most: Tensor) -> tuple[Tensor, Tensor]:
    """The least powers of 2 that are not below these numbers, as numbers and as files have them."""
    exponents = torch.ceil(torch.log2(most))
    return torch.exp2(exponents), (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def _fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    powers, stored = _powers(padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).abs().amax((1, 3)) / 448)
    spread = powers.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    codes = (weight / spread).to(FP8)
    return codes, stored, codes.float() * spread


def _mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    powers, stored = _powers(weight.unflatten(1, (-1, 32)).abs().amax(-1) / 6)
    packed, decoded = fp4(weight, powers, 32)
    return packed.view(torch.int8), stored, decoded


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(published, plain) checkpoints of the same weights, and the latter as transformers writes it."""
    family, sizes = EXPERT_SHAPES["deepseek v4"]
    sizes = {**sizes, **SIZES}
    plain = write_tiny_model(tmp_path_factory.mktemp("plain") / "model", family, **sizes)
    published = tmp_path_factory.mktemp("published") / "model"
    shutil.copytree(plain, published)
    tensors = load_file(plain / "model.safetensors")
    if not any(name.endswith(".attn.wkv.weight") for name in tensors):
        pytest.skip("this version of transformers writes other names than published files have")
    stored = {"mtp.0.e_proj.weight": torch.ones(64, 64)}
    for own, weight in tensors.items():
        name = own
        for found, wanted in NAMES.items():
            name = re.sub(found, wanted, name)
        encode = _fp8_blocks if IN_FP8.search(name) else _mxfp4 if IN_FP4.search(name) else None
        if encode is None:
            stored[name] = weight
            continue
        stored[name], stored[name.replace(".weight", ".scale")], tensors[own] = encode(weight)
    save_file(stored, published / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    values = {**json.loads((plain / "config.json").read_text()), **KEYS, "torch_dtype": "float32"}
    (published / "config.json").write_text(json.dumps({key: values[key] for key in values if key not in LEFT_OUT}))
    return published, plain


@pytest.mark.parametrize(("rank", "size", "options"), [(0, 1, {}), (1, 2, {}), (1, 2, {"expert_parallel": True})])
def test_weights_are_those_that_the_codes_stand_for(
    rank: int, size: int, options: dict[str, Any], checkpoints: tuple[Path, Path]
) -> None:
    found, expected = (load_parameters(path, rank, size, **options) for path in checkpoints)
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name


@pytest.mark.parametrize("quantization", ["fp8", "w4a16", "w4a8"])
def test_kept_weights_are_the_same_numbers(quantization: KeptWeights, checkpoints: tuple[Path, Path]) -> None:
    """Layers keep the codes and scales of blocks, but for the first step of the output projection, which is plain;
    experts keep theirs, or become FP8 with a power of 2 for each row."""
    published, plain = checkpoints
    config = load_model_config(published).with_quantization(quantization)
    assert config.divides_by(1)
    assert not config.divides_by(2), "the pieces of this small model are no whole blocks"
    found = dict(load_model(published, quantization=quantization).named_parameters())
    expected, counts = load_parameters(plain), {FP8: 0, torch.int16: 0}
    for name, parameter in found.items():
        if parameter.dtype not in counts:
            assert name not in expected or torch.equal(parameter, expected[name]), name
            continue
        counts[parameter.dtype] += 1
        is_of_experts = ".experts." in name
        scales = found[name.replace("_proj", "_scale") if is_of_experts else name.replace("weight", "weight_scale")]
        if parameter.dtype == torch.int16:
            values, kind = expected[name], "mxfp4 for fp8" if quantization == "w4a8" else "mxfp4"
            format = W4Format(kind, 32).for_rows(values.shape[1] // (2 if "gate" in name else 1))
            decoded = [
                dequantise_words(words, scale, values.shape[2], format)
                for words, scale in zip(parameter, scales, strict=True)
            ]
            assert torch.equal(torch.stack(decoded), values), name
        elif is_of_experts:
            assert torch.equal(parameter.float() * scales.unsqueeze(-1), expected[name]), name
        else:
            assert torch.equal(dequantise_weight(parameter, scales), expected[name]), name
    of_experts, of_layers = 2 * 3, 5 * 3
    assert counts == (
        {FP8: of_experts + of_layers, torch.int16: 0}
        if quantization == "fp8"
        else {FP8: of_layers, torch.int16: of_experts}
    )


def test_logits_with_kept_weights(checkpoints: tuple[Path, Path]) -> None:
    """On a GPU without units for FP8, which multiplies by the values of all weights."""
    published, plain = checkpoints
    ids = list(range(2, 40))
    driver = ModelDriver(published, quantization="w4a16", has_fp8_units=False)
    torch.testing.assert_close(
        driver.step((RequestState(), ids))[0], reference_logits(plain, ids), atol=1e-4, rtol=1e-4
    )


def test_a_table_that_sends_a_token_to_one_expert_twice_is_refused(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(checkpoints[0], tmp_path / "model"))
    for row, problem in (([2, 5, 2], "a token that goes to one expert twice"), ([0, 1, 8], "experts from 0 to 8")):
        edit_weights(path, lambda tensors, row=row: tensors["layers.0.ffn.gate.tid2eid"][7].copy_(torch.tensor(row)))
        with pytest.raises(LoadError, match=f"tid2eid has {problem}"):
            load_model(path)


def test_a_scale_that_4_bits_cannot_have_is_refused(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    path, name = Path(shutil.copytree(checkpoints[0], tmp_path / "model")), "layers.1.ffn.experts.3.w2.scale"
    edit_weights(path, lambda tensors: tensors[name].view(torch.uint8)[5].fill_(129))
    with pytest.raises(LoadError, match=f"{name} has scales above 128"):
        load_model(path, quantization="w4a8")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"compress_ratios": [0, 4, 5]}, "`compress_ratios`: 5 is not supported, only 0, 4, 128"),
        ({"compress_ratios": [0, 0]}, r"`compress_ratios`: \[0, 0\] is not a list for 3 layers"),
        ({"layer_types": ["full_attention"] * 3}, '`layer_types`: "full_attention" is not supported, only sliding_'),
        ({"mlp_layer_types": ["dense"] * 3}, '`mlp_layer_types`: "dense" is not supported, only hash_moe and moe'),
        ({"o_groups": 3}, "`o_groups`: 3 groups do not divide 2 attention heads"),
        ({"qk_rope_head_dim": 63}, "`qk_rope_head_dim`: 63 of 128 numbers of a head cannot be rotated in pairs"),
        ({"scoring_func": "sigmoid"}, '`scoring_func`: "sigmoid" is not supported; supported: "sqrtsoftplus"'),
        ({"expert_dtype": "int4"}, '`quantization_config.expert_dtype`: "int4" is not supported, only fp8 and fp4'),
    ],
)
def test_what_is_not_computed_is_refused(
    values: dict[str, Any], problem: str, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copy(checkpoints[0] / "config.json", tmp_path)
    edit_json(tmp_path / "config.json", **values)
    with pytest.raises(LoadError, match=problem):
        load_model_config(tmp_path)
