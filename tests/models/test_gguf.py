"""Models in GGUF, written by llama.cpp's own library, are those that they were made from; damaged files are errors."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from rank_weights import load_model, load_parameters
from torch import Tensor

import gguf_files
from checkpoints import write_tiny_model
from expert_shapes import EXPERT_SHAPES, GPT_OSS
from family_shapes import FULL, HYBRID, HYBRID_EXPERTS, LINEAR, NEMOTRON, SHAPES
from gguf_files import write_copy, write_gguf
from model_driver import CPU
from nvcli.core.config import RunConfig
from nvcli.demo import demo_path
from nvcli.errors import ConfigError, LoadError
from nvcli.job.run.image_settings import why_no_images
from nvcli.job.text.tokenizer import Tokenizer
from nvcli.kernels.w4 import dequantise, w4_rows
from nvcli.models.checkpoint import is_hub_id, read_tensors, resolve_model, weight_files
from nvcli.models.config import load_model_config
from nvcli.models.embedding_files import EmbeddingFiles, read_embedding_files
from nvcli.models.experts import Experts
from nvcli.models.geometry import EMBEDDING, HEAD, model_tensors
from nvcli.models.gguf import tokenizer as gguf_tokenizer
from nvcli.models.gguf.architectures import ARCHITECTURES
from nvcli.models.gguf.blocks import numbers_of_blocks
from nvcli.models.gguf.folder import make_config
from nvcli.models.gguf.header import read_header
from nvcli.models.gguf.tensors import join_latents, read_gguf
from nvcli.models.gguf.types import BLOCK_TYPES, TENSOR_TYPES
from nvcli.models.layer_config import LayerConfig
from nvcli.models.linear_methods import W4LinearMethod
from nvcli.models.mixers.delta_net import DeltaNetConfig
from nvcli.models.parallel import VocabShard
from nvcli.models.pinned_upload import PinnedUpload
from nvcli.models.rope import rope_frequencies
from nvcli.models.stored_values import OpenFiles

TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": [f"<{number}>" for number in range(97)],
    "tokenizer.ggml.token_type": [3] * 97,
    "tokenizer.ggml.merges": ["a b"],
}
"""A tokenizer for tiny models, which none of these tests uses."""
EXPERTS = ("Qwen3Moe", "GptOss")
TIED = {"tie_word_embeddings": True}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
MSCALE = {**YARN, "rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.7}
V2, V3 = EXPERT_SHAPES["deepseek v2, queries without latents"], EXPERT_SHAPES["deepseek v3"]
MSCALE4 = {**MSCALE, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 2 / 3}
LLAMA4 = {
    **{key: EXPERT_SHAPES["llama 4 with vision"][1][key] for key in ("num_local_experts", "num_experts_per_tok")},
    "intermediate_size": 48,
    "intermediate_size_mlp": 40,
    "num_hidden_layers": 4,
    "interleave_moe_layer_step": 2,
    "hidden_size": 64,
}
LINEAR_FIRST = {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL]}
GEMMA4_MOE = "gemma 4 with vision, experts beside an mlp"
GEMMA3 = {"sliding_window": 20, "num_hidden_layers": 7, "query_pre_attn_scalar": 16, "rope_parameters": None, **TIED}
FOUR = {"num_hidden_layers": 4, "layer_types": None, "full_attention_interval": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", TIED),
    "qwen3, yarn": ("Qwen3", {"rope_parameters": YARN}),
    "gemma": ("Gemma", {"hidden_act": "gelu_pytorch_tanh", **TIED}),
    "gemma 2": ("Gemma2", {"sliding_window": 20, "num_hidden_layers": 3, "query_pre_attn_scalar": 16, **TIED}),
    "gemma 3": ("Gemma3Text", GEMMA3),
    **{
        name: SHAPES[name]
        for name in (
            *("smollm3, layers without rope", "granite", "phi 3", "phi 4, longrope of short runs", "olmo 2"),
            *("ernie 4.5", "lfm2 moe", "granite 4, mamba and experts"),
            *("gemma 4, keys as values", "gemma 4, inputs of each layer and shared keys"),
            *("exaone 4", "glm 4", "seed-oss", "youtu-llm", "command r+", "cohere 2"),
            *("ministral 3, queries that grow", "lfm2"),
        )
    },
    **{
        name: EXPERT_SHAPES[name]
        for name in (
            *("mixtral", "qwen2 moe", "qwen3 moe", "granite 3 moe", "glm 4.5"),
            *("k-exaone", "deepseek v2, best groups", "minimax m2", "olmoe", "ernie 4.5 moe", "hunyuan v1 moe"),
        )
    },
    "deepseek 2, queries without latents": ("DeepseekV2", {**V2[1], "rope_parameters": MSCALE}),
    "deepseek 3": ("DeepseekV3", {**V3[1], "rope_parameters": MSCALE}),
    "gemma 4, experts beside an mlp": ("Gemma4Text", EXPERT_SHAPES[GEMMA4_MOE][1]),
    "granite 4, mamba": (
        "GraniteMoeHybrid",
        {
            **SHAPES["granite 4, mamba and experts"][1],
            "num_local_experts": 0,
            "num_hidden_layers": 2,
            "layer_types": [LINEAR, FULL],
        },
    ),
    "mistral 4": ("Mistral4", {**EXPERT_SHAPES["mistral 4"][1], "rope_parameters": MSCALE4}),
    "llama 4": ("Llama4Text", LLAMA4),
    "afmoe": ("Afmoe", {**EXPERT_SHAPES["afmoe"][1], "global_attn_every_n_layers": 4}),
    "mimo v2 flash": EXPERT_SHAPES["mimo v2 flash"],
    "glm 5": EXPERT_SHAPES["glm 5, shared choices"],
    "hunyuan v1": ("HunYuanDenseV1", {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
    "nemotron-h": ("NemotronH", {**NEMOTRON, "layers_block_type": [LINEAR, "mlp", FULL, "mlp"]}),
    "nemotron 3 super": (
        "NemotronH",
        {**NEMOTRON, "layers_block_type": [LINEAR, "moe", FULL, "moe"], "moe_latent_size": 32},
    ),
    "kimi linear": ("KimiLinear", {**EXPERT_SHAPES["kimi linear"][1], "n_group": 1, "topk_group": 1}),
    "dots 1": ("Dots1", {**EXPERT_SHAPES["dots 1"][1], "sliding_window": None}),
    "gpt-oss": ("GptOss", {**GPT_OSS, "swiglu_limit": 7.0}),
    "olmo 3": ("Olmo3", {"sliding_window": 20, "num_hidden_layers": 4, "rope_parameters": {**YARN, "rope_theta": 1e4}}),
    "qwen 3-next": ("Qwen3Next", {**HYBRID_EXPERTS, **FOUR}),
    "qwen 3.5": ("Qwen3_5Text", {**HYBRID, **FOUR, "linear_num_key_heads": 4, "linear_num_value_heads": 12}),
    "qwen 3.5 moe": ("Qwen3_5MoeText", {**HYBRID_EXPERTS, **FOUR}),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


OTHER_NAMES = {"Qwen3NextForCausalLM": "Qwen3_5MoeForCausalLM"}
"""Families whose tensors files have as another's."""


def as_in_gguf(layer: LayerConfig) -> LayerConfig:
    is_by_head = isinstance(layer.mixer, DeltaNetConfig) and layer.mixer.stored == "by head"
    return replace(layer, mixer=replace(layer.mixer, stored="qkv")) if is_by_head else layer


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_in_gguf_is_that_in_safetensors(name: str, tmp_path: Path) -> None:
    family, settings = FAMILIES[name]
    path = write_tiny_model(tmp_path / "model", family, **settings)
    folder = resolve_model(str(write_gguf(path, tmp_path / "model.gguf", **TOKENIZER)))
    expected, found = load_model_config(path), load_model_config(folder)
    if name == "llama 3":  # whose frequencies are divided by numbers in the file
        ropes = [config.layers[0].mixer.rope for config in (expected, found)]
        (one, _), (other, _) = (rope_frequencies(rope, 16, 512) for rope in ropes)
        assert torch.allclose(one, other)
    else:
        here = found.decoder
        kinds = tuple(map(as_in_gguf, expected.decoder.layer_kinds))
        # Heads that draft are not read.
        assert here == replace(expected.decoder, mtp=None, layout=here.layout, layer_kinds=kinds)
    assert found.architecture == OTHER_NAMES.get(expected.architecture, expected.architecture)
    for field in ("vocab_size", "tie_word_embeddings", "max_position_embeddings", "dtype"):
        assert getattr(found, field) == getattr(expected, field), field
    for rank in (0, 1):
        kept = load_parameters(path, rank, 2)
        for parameter, values in load_parameters(folder, rank, 2).items():
            assert torch.allclose(values, kept[parameter], atol=3e-7, rtol=0), parameter


def test_files_from_before_latents_were_attended_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the projection from latents as the model has it, and the sizes of heads under other keys."""
    monkeypatch.setattr(gguf_files, "split_latents", lambda tensor, config: [("kv_b", tensor)])
    path = write_tiny_model(tmp_path / "model", V2[0], **V2[1])
    sizes = {"key_length_mla": None, "value_length_mla": None, "key_length": 24, "value_length": 12, "head_count_kv": 4}
    others = {f"deepseek2.attention.{key}": value for key, value in sizes.items()}
    folder = resolve_model(str(write_gguf(path, tmp_path / "model.gguf", **TOKENIZER, **others)))
    mixer = load_model_config(path).decoder.layers[0].mixer
    assert replace(load_model_config(folder).decoder.layers[0].mixer, rope=mixer.rope, scale=mixer.scale) == mixer
    kept = load_parameters(path)
    for parameter, values in load_parameters(folder).items():
        assert torch.equal(values, kept[parameter]), parameter


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_tensors_that_the_library_knows_have_names(name: str) -> None:
    """But for tables of rotations, which are settings or not used, drafting heads, and what other kinds of models of
    the family have."""
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    unread = {"qwen3next": "blk.0.ssm_in", "lfm2": "dense_2"}
    for tensor in gguf.MODEL_TENSORS[number]:
        module = gguf.TENSOR_NAMES[tensor].format(bid=0)
        stored = [f"{module}{end}" for end in (".weight", ".bias", "")]
        if "rope_" not in module and "rot_embd" not in module and "nextn" not in module and module != unread.get(name):
            assert any(ARCHITECTURES[name].decoder_name(one) != one for one in stored), module


@pytest.mark.parametrize("name", ["llama 3", "gemma 2", "qwen 3.5"])
def test_weights_are_those_that_transformers_reads(name: str, tmp_path: Path) -> None:
    """The orders of rows and columns, and changed values, are undone as there."""
    for needed in ("accelerate", "transformers.integrations.gguf.gguf_conversion_mapping"):
        pytest.importorskip(needed)
    family, settings = FAMILIES[name]
    path = write_tiny_model(tmp_path / "model", family, **settings)
    own = {"qwen35.rope.dimension_sections": [1, 1, 0, 0], "qwen35.full_attention_interval": 4}
    (tmp_path / "gguf").mkdir()
    others = {**TOKENIZER, "general.name": "tiny", **(own if name == "qwen 3.5" else {})}
    file = write_gguf(path, tmp_path / "gguf" / "model.gguf", choose=lambda name: Type.F16, **others)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    expected, infos = loaded.state_dict(), read_gguf(file)
    with OpenFiles() as files:
        for tensor, info in infos.items():
            values = files.read(info, [slice(0, length) for length in info.shape], CPU).float()
            assert torch.allclose(values, expected[tensor], atol=3e-7, rtol=0), tensor
    assert set(expected) - set(infos) <= {"lm_head.weight"}


@pytest.mark.parametrize(("family", "architecture"), [("Qwen2", "qwen2vl"), ("Qwen3", "qwen3vl")])
def test_text_parts_of_models_that_read_images(family: str, architecture: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model", family)
    folder = resolve_model(str(write_gguf(path, tmp_path / "model.gguf", architecture=architecture, **TOKENIZER)))
    assert load_model_config(folder).decoder == load_model_config(path).decoder
    assert load_parameters(folder).keys() == load_parameters(path).keys()
    assert "(mmproj)" in (why_no_images(RunConfig(model="m"), folder, load_model_config(folder)) or "")


def test_numbers_of_one_bit() -> None:
    """The library does not read them."""
    packed = [0b10000001, *[0] * 14, 0b01000000]
    block = torch.tensor([[*np.float16(1.5).tobytes(), *packed]], dtype=torch.uint8)
    found = numbers_of_blocks(block, "Q1_0")
    assert found.shape == (1, BLOCK_TYPES["Q1_0"].block)
    assert (found > 0).nonzero().tolist() == [[0, 0], [0, 7], [0, 126]]
    assert (found.abs() == 1.5).all()


@pytest.mark.parametrize("name", sorted(BLOCK_TYPES.keys() - {"Q1_0"}))
def test_numbers_of_blocks_are_those_of_the_library(name: str) -> None:
    kind = Type[name]
    assert TENSOR_TYPES[kind] == BLOCK_TYPES[name] == (name, *gguf.GGML_QUANT_SIZES[kind])
    blocks = np.random.default_rng(0).integers(0, 256, (50, BLOCK_TYPES[name].block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, kind)
        found = numbers_of_blocks(torch.from_numpy(blocks), name)
    assert np.array_equal(found.numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("family", ["Llama", "Mixtral", "Phi3"])
def test_ranks_keep_the_numbers_of_blocks(family: str, tmp_path: Path) -> None:
    """In parts, of many types, and kept in FP8: as those of plain numbers that the library makes of the blocks."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1} if family == "Mixtral" else {}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 97, "head_dim": 64, **experts}
    path = write_tiny_model(tmp_path / "model", family, **sizes)
    kinds = [Type[name] for name in ("Q8_0", "Q4_K", "Q6_K", "F16", "Q5_0", "BF16", "Q4_0", "Q5_K", "IQ4_XS", "Q3_K")]
    kinds += [Type.Q2_K, Type.IQ2_XXS]
    number = iter(range(1000))
    write_gguf(
        path,
        tmp_path / "model-Q4_K_M.gguf",
        choose=lambda name: kinds[next(number) % len(kinds)],
        split_max_tensors=9,
        **TOKENIZER,
    )
    parts = sorted(tmp_path.glob("*.gguf"))
    assert parts[-1].name.endswith(f"-of-{len(parts):05}.gguf")
    folder, plain = resolve_model(str(parts[1])), write_copy(parts, tmp_path / "plain" / "model.gguf")
    assert weight_files(folder) == parts
    assert load_model_config(folder).dtype == "bfloat16"
    for rank in (0, 1):
        expected = load_parameters(resolve_model(str(plain)), rank, 2)
        for parameter, values in load_parameters(folder, rank, 2).items():
            assert torch.equal(values, expected[parameter]), parameter
    in_fp8 = [load_model(each, quantization="fp8").state_dict() for each in (folder, resolve_model(str(plain)))]
    for parameter, values in in_fp8[0].items():
        assert torch.equal(values.float(), in_fp8[1][parameter].float()), parameter


@pytest.mark.parametrize(
    ("family", "blocks"),
    [
        ("Llama", "Q4_K"),
        ("Phi3", "Q4_0"),
        ("Qwen3_5Text", "Q4_1"),
        ("Lfm2", "Q5_0"),
        ("Qwen2", "Q6_K"),
        ("Qwen3Moe", "Q5_K"),
        ("Qwen3Moe", "MXFP4"),
        ("GptOss", "MXFP4"),
    ],
)
def test_ranks_keep_blocks_as_they_are(family: str, blocks: str, tmp_path: Path) -> None:
    """In 4 bits or 8, but for the layers that are in other types, and with the LM head or the embedding that it is tied
    to; or as plain numbers."""
    count = "num_local_experts" if family == "GptOss" else "num_experts"
    size = 256 if blocks.endswith("K") else 64  # whole blocks
    width = 96 if family == "Phi3" else 2 * size  # of which ranks may have halves
    experts = {count: 2, "num_experts_per_tok": 1, "moe_intermediate_size": size} if family in EXPERTS else {}
    settings: dict[str, Any] = {"head_dim": max(16, size // 4), "num_hidden_layers": 3}
    if family == "Qwen3_5Text":  # whose values lie in another order, by rows and by columns
        settings = {**FAMILIES["qwen 3.5"][1], "linear_value_head_dim": 32}
    if family == "Lfm2":  # whose files have other names than the decoder
        settings = dict(FAMILIES["lfm2"][1])
    settings |= {"hidden_size": size, "intermediate_size": width, "vocab_size": 97}
    settings |= TIED if family == "Qwen2" else {}
    path = write_tiny_model(tmp_path / "model", family, **settings, **experts)
    others = {"token_embd.weight": Type.Q8_0, "blk.1.ffn_down.weight": Type.Q4_1, "blk.1.attn_q.weight": Type.F16}
    others |= {"blk.2.ffn_up_exps.weight": Type.Q8_0} if blocks == "MXFP4" else {}
    if size == 256:
        others |= {"blk.0.attn_v.weight": Type.Q6_K, "blk.0.ffn_down.weight": Type.Q6_K}
        others |= {"blk.2.attn_q.weight": Type.Q4_K, "blk.0.ffn_down_exps.weight": Type.Q6_K}
        others |= {"blk.2.ffn_gate_exps.weight": Type.Q3_K, "blk.2.ffn_up_exps.weight": Type.IQ4_XS}

    def choose(name: str) -> Type:
        is_plain = (
            "gate_inp" in name
            or name.endswith(("conv1d.weight", "conv.weight"))
            or (blocks == "MXFP4" and not name.endswith("exps.weight"))
        )
        return others.get(name, Type.F32 if is_plain else Type[blocks])

    folder = resolve_model(str(write_gguf(path, tmp_path / "model.gguf", choose=choose, **TOKENIZER)))
    config = load_model_config(folder)
    assert config.quantisation is not None
    assert config.quantisation.kept_as == "w4a16"
    assert config.quantisation.name == f"GGUF's {blocks}"
    for rank in (0, 1):
        plain = load_parameters(folder, rank, 2)
        model = load_model(folder, rank, 2, quantization="w4a16")
        decoded: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, Experts) and module.formats is not None:
                for part, form in zip(("gate_up", "down"), module.formats, strict=True):
                    weight = f"{name}.{part}_proj"
                    stacks = zip(getattr(module, f"{part}_proj"), getattr(module, f"{part}_scale"), strict=True)
                    columns = plain[weight].shape[2]
                    decoded[weight] = torch.stack([dequantise(*one, columns, form) for one in stacks])
            elif isinstance(getattr(module, "method", None), W4LinearMethod):
                weight = f"{name}.weight"
                columns = plain[weight].shape[1]
                decoded[weight] = dequantise(module.weight, module.weight_scale, columns, module.method.format)
            elif isinstance(module, VocabShard) and module.format is not None:
                values = dequantise(module.weight, module.weight_scale, size, module.format)
                decoded[f"{name}.weight"] = values
                rows = torch.zeros(97, size)
                first = rank * len(values)
                rows[first : first + len(values)] = values[: 97 - first]
                ids, out = torch.arange(97), torch.empty(97, size)
                assert torch.equal(w4_rows(ids, module.weight, module.weight_scale, module.format, first, out), rows)
        assert len(decoded) >= (4 if blocks == "MXFP4" else 6)
        assert (f"{EMBEDDING if family == 'Qwen2' else HEAD}.weight" in decoded) == (blocks != "MXFP4")
        for parameter, values in model.named_parameters():
            if not parameter.endswith("_scale"):
                error = (decoded.get(parameter, values) - plain[parameter]).abs().max()
                most = 2**-11 * float(values.dtype == torch.int16 and size == 256)  # of scales and offsets in float16
                assert error <= most * plain[parameter].abs().max(), parameter
        kept = model_tensors(config.with_quantization("w4a16"), "float32")
        held = sum(one.numel() * one.element_size() for one in model.parameters())
        assert held == sum(tensor.kept_bytes(2) for tensor in kept)
        if blocks == "MXFP4":
            check_fp8_of_experts(load_model(folder, rank, 2, quantization="fp8").state_dict(), plain)


def check_fp8_of_experts(found: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    """Numbers of MXFP4 lose no bit in FP8."""
    for name in ("gate_up", "down"):
        parameter = f"model.layers.0.mlp.experts.{name}_proj"
        scales = found[parameter.replace("_proj", "_scale")].unsqueeze(2)
        assert torch.equal(found[parameter].float() * scales, plain[parameter])


@pytest.mark.parametrize("is_uploaded", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Youtu"])
def test_parts_of_rows_and_columns_are_those_of_the_whole(family: str, is_uploaded: bool, tmp_path: Path) -> None:
    """Within blocks, and within heads whose rows are paired, or in two tensors; also read as for a GPU."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    sizes |= {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "q_lora_rank": 64} if family == "Youtu" else {}
    path = write_tiny_model(tmp_path / "model", family, **sizes)
    kind = Type.Q4_K if family == "Llama" else Type.Q8_0
    file = write_gguf(path, tmp_path / "model.gguf", choose=lambda name: kind, **TOKENIZER)
    infos, draw = read_gguf(file), random.Random(0)
    join_latents(infos)
    projection = "q_proj" if family == "Llama" else "kv_b_proj"
    for name in (f"model.layers.0.self_attn.{projection}.weight", "model.layers.0.mlp.up_proj.weight"):
        rows, columns = infos[name].shape
        with OpenFiles(PinnedUpload(CPU) if is_uploaded else None) as files:
            whole = files.read(infos[name], (slice(0, rows), slice(0, columns)), CPU)
            for _ in range(20):
                top, bottom = sorted(draw.sample(range(rows + 1), 2))
                left, right = sorted(draw.sample(range(columns + 1), 2))
                part = files.read(infos[name], (slice(top, bottom), slice(left, right)), CPU)
                assert torch.equal(part, whole[top:bottom, left:right])


TEXTS = (
    "What is 1234567 + 58?\n\n  It's  100 %.",
    "<|im_start|>user\nHi!<|im_end|>\n",
    "Ünïcode, 日本語 and 😀\t\r\n",
    "  two spaces, ﬁnally",
    "",
)


def test_a_byte_level_tokenizer_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    folder = resolve_model(str(write_gguf(demo_path(), tmp_path / "model.gguf")))
    found, expected = Tokenizer.load(folder), Tokenizer.load(demo_path())
    assert found.encode(TEXTS, add_special_tokens=True) == expected.encode(TEXTS, add_special_tokens=True)
    assert found.vocab() == expected.vocab()
    assert (found.eos_token_id, found.chat_template) == (expected.eos_token_id, expected.chat_template)
    ids = list(range(640))
    assert found.decode([ids]) == expected.decode([ids])
    assert load_model_config(folder).eos_token_ids == (2, 0)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4", "phi3"])
def test_a_tokenizer_with_scores_is_the_one_that_was_trained(name: str, tmp_path: Path) -> None:
    """Merges follow from the scores of the tokens, or for Gemma from their ids."""
    special = ["<unk>", "<s>", "</s>", "<|end|>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    marks = [tokenizers.normalizers.Replace(" ", "▁")]
    marks = [tokenizers.normalizers.Prepend("▁"), *marks] if not name.startswith("gemma") else marks
    made.normalizer = tokenizers.normalizers.Sequence(marks)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=pieces, show_progress=False)
    corpus = (demo_path() / "example.jsonl").read_text().splitlines()
    made.train_from_iterator([word for line in corpus for word in line.split()] + ["a" + " " * 8] * 99, trainer)
    made.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True, rstrip=name == "phi3", normalized=False)])
    vocabulary = sorted(made.get_vocab(), key=made.get_vocab().__getitem__)
    kinds = [2, 3, 3, 3, *[6] * 256, *[1] * (len(vocabulary) - 260)]
    spaces = vocabulary.index("▁▁▁▁")  # which llama.cpp's converter writes in another way
    vocabulary[spaces], kinds[spaces] = "    ", 4 if name == "gemma3" else 1
    merges = [" ".join(merge) for merge in json.loads(made.to_str())["model"]["merges"]]
    own = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges, "tokenizer.ggml.bos_token_id": 1}
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.scores": [-1000.0 if name == "gemma3" else float(-number) for number in range(len(vocabulary))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": not name.startswith("gemma"),
        **(own if name == "gemma4" else {}),
    }
    written = gguf_tokenizer.GGUFVocabulary(tmp_path / "model.gguf", metadata).tokenizer(name)
    found = tokenizers.Tokenizer.from_str(json.dumps(written))
    texts = [*TEXTS, "What is it<|end|>\n and       now?", *corpus[:5]]
    for text in texts:
        expected = made.encode(text).ids
        assert found.encode(text).ids == [1, *expected], text
        assert found.decode(found.encode(text).ids) == text or "<|end|>" in text


def test_expressions_that_split_text_are_those_of_transformers() -> None:
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    known = {name: split for name, split in mapping.GGUF_PRE_TOKENIZER_SPLITS.items() if name in gguf_tokenizer.SPLITS}
    assert len(known) > 15
    for name, split in known.items():
        assert gguf_tokenizer.SPLITS[name] == (split,), name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepseek-llm", ["Hello", " World", "\n", "１", "ა", "，", " ", "世界", "  "]),
        ("kimi-k2", ["Hello", " World's", "123", "4", "我想在", "apple", "工作", "!\n", "  "]),
        ("afmoe", ["Hello", " World", "1", "234", "567", "我想在", "สวัสดี", "apple", "!\n", "  "]),
        ("tiny_aya", ["Hello", "World's", " ", "1", "234", "567", "!/\n"]),
        ("minicpm5", ["Hello", " World", "'s", "123", "4", "!\n"]),
        ("gpt-4o", ["Hello", "World's", " ", "123", "4", "我想在apple", "!/\n"]),
    ],
)
def test_text_is_split_as_the_expressions_say(name: str, words: list[str]) -> None:
    text, found = "".join(words), ["".join(words)]
    for expression in gguf_tokenizer.SPLITS[name]:
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")
        found = [word for part in found for word, _ in split.pre_tokenize_str(part)]
    assert found == words, text


def test_settings_of_sampling_templates_and_ends(tmp_path: Path) -> None:
    others = {
        **TOKENIZER,
        "tokenizer.ggml.tokens": [*TOKENIZER["tokenizer.ggml.tokens"][:96], "<|im_end|>"],
        "tokenizer.ggml.token_type": [1, *TOKENIZER["tokenizer.ggml.token_type"][1:]],
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_templates": ["tool_use", "../odd"],
        "tokenizer.chat_template.tool_use": "{{ tools }}",
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "tokenizer.ggml.suppress_tokens": [9, 8],
        "qwen3.pooling_type": 1,
    }
    model = write_tiny_model(tmp_path / "model", "Qwen3", **TIED)
    folder = resolve_model(str(write_gguf(model, tmp_path / "model.gguf", **others)))
    config = load_model_config(folder)
    assert config.eos_token_ids == (5, 7, 96)
    assert config.generation_defaults == {"temperature": 0.6, "top_k": 20, "bad_words": [[9], [8]]}
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode(["<9>"], add_special_tokens=True) == [[3, 9]]
    assert tokenizer.chat_template == "{{ messages }}\n{{ tools }}"
    assert read_embedding_files(folder) == EmbeddingFiles(pooling="mean", normalizes=True)
    both_ways = write_gguf(model, tmp_path / "embeds.gguf", **{**others, "qwen3.attention.causal": False})
    assert load_model_config(resolve_model(str(both_ways))).both_ways


@pytest.mark.parametrize("ends", [["<|return|>", "<|call|>"], ["<|flush|>", "<|calls|>"]])
def test_a_message_of_gpt_oss_or_solar_ends_no_answer(ends: list[str], tmp_path: Path) -> None:
    tokens = ["<|end|>", *ends, "<|channel|>", "</s>"]
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3] * 5}
    assert gguf_tokenizer.GGUFVocabulary(tmp_path, metadata).end_ids() == [1, 2, 4]
    metadata["tokenizer.ggml.token_type"] = [3, 3, 3, 3, 4]  # a tag of HTML
    assert gguf_tokenizer.GGUFVocabulary(tmp_path, metadata).end_ids() == [1, 2]
    metadata["tokenizer.ggml.tokens"] = [*tokens[:2], "a", "b", "c"]
    assert gguf_tokenizer.GGUFVocabulary(tmp_path, metadata).end_ids() == [0, 1]


def test_a_folder_is_made_once_for_each_content(tmp_path: Path) -> None:
    """A file, its folder, and the folder that is made of it are one model; a file that changes is another."""
    (tmp_path / "models").mkdir()
    file = write_gguf(demo_path(), tmp_path / "models" / "Demo-F32.GGUF")
    folder = resolve_model(str(file))
    assert resolve_model(str(file.parent)) == folder
    assert read_tensors(resolve_model(str(folder))).keys() == read_tensors(folder).keys()
    assert not is_hub_id(str(file))
    with pytest.raises(ConfigError, match="only models named by their id"):
        resolve_model(str(file), revision="main")
    other = resolve_model(str(write_gguf(demo_path(), tmp_path / "other.gguf")))
    (tmp_path / "other.gguf").unlink()
    write_gguf(demo_path(), file, choose=lambda name: Type.F16)
    changed = resolve_model(str(file))
    assert changed != folder
    assert load_model_config(changed).dtype == "float16"
    assert folder.exists()
    assert not other.exists(), "what was made of a file that is gone is removed"
    for unused in (folder, changed):
        os.utime(unused, (1e9, 1e9))
    assert resolve_model(str(file)) == changed
    resolve_model(str(write_gguf(demo_path(), tmp_path / "next.gguf")))
    assert changed.exists()
    assert not folder.exists(), "so is what no run has used for long"
    write_gguf(demo_path(), file.with_name("demo-Q8_0.gguf"))
    with pytest.raises(LoadError, match=r"several GGUF models: Demo-F32\.GGUF, demo-Q8_0\.gguf; name one: .*/Demo"):
        resolve_model(str(file.parent))


def test_folders_are_made_of_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file takes the place of another with its size and time, and its name may be no text; other models' files, and
    the cache, may be out of reach."""
    file = write_gguf(demo_path(), tmp_path / os.fsdecode(b"d\xe9mo.gguf"))
    folder, found = resolve_model(str(file)), file.stat()
    others = [folder.with_name(name) for name in ("one", "other")]
    for other in others:
        other.mkdir()
        (other / "model.gguf").symlink_to("n" * 300)
    rmtree = shutil.rmtree
    # As another process does meanwhile, all of them are removed at once.
    monkeypatch.setattr(shutil, "rmtree", lambda path, **how: [rmtree(one, **how) for one in others])
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    changed = resolve_model(str(file))
    assert changed != folder
    assert weight_files(changed) == [file]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("n" * 300)))
    with pytest.raises(LoadError, match="too long; set XDG_CACHE_HOME to a folder that can be written to"):
        resolve_model(str(file))


def test_a_tokenizer_that_is_not_read_may_lie_beside_the_file(tmp_path: Path) -> None:
    file = write_gguf(
        demo_path(), tmp_path / "model.gguf", **{"tokenizer.ggml.pre": "new-one", "general.sampling.top_k": 20}
    )
    with pytest.raises(LoadError, match=r"`tokenizer\.ggml\.pre`: \"new-one\" .* beside the file"):
        resolve_model(str(file))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((demo_path() / name).read_bytes())
    folder = resolve_model(str(file))
    assert Tokenizer.load(folder).vocab() == Tokenizer.load(demo_path()).vocab()
    config = load_model_config(folder)
    assert (config.eos_token_ids, config.generation_defaults) == ((2,), {"top_k": 20})


def truncate(data: bytes) -> bytes:
    return data[:-1000]


def in_other_order(data: bytes) -> bytes:
    return data[:4] + data[4:8][::-1] + data[8:]


@pytest.mark.parametrize(
    ("others", "change", "told"),
    [
        ({}, truncate, ["truncated: tensor", "download it again"]),
        ({}, lambda data: data[:300], ["truncated or corrupt", "download it again"]),
        ({}, lambda data: b"", ["not a GGUF file (0 bytes)"]),
        ({}, in_other_order, ["big-endian", "gguf_convert_endian"]),
        ({}, lambda data: data[:4] + b"\1" + data[5:], ["GGUF version 1; supported: 2 and 3"]),
        ({}, lambda data: b"version https://git-lfs.github.com", ["git lfs pull"]),
        ({"general.architecture": "rwkv7"}, None, ['"rwkv7" is not supported in GGUF', "safetensors", "qwen3"]),
        ({"general.type": "mmproj"}, None, ["no language model", "mmproj", "read from *.safetensors"]),
        ({"general.architecture": "clip"}, None, ["no language model", '"clip"']),
        ({"tokenizer.ggml.pre": ["qwen2"], "tokenizer.chat_templates": 1}, None, ['`tokenizer.ggml.pre`: ["qwen2"]']),
        ({"tokenizer.ggml.model": None}, None, ["no tokenizer", "tokenizer.json"]),
        ({"tokenizer.ggml.model": "t5"}, None, ['`tokenizer.ggml.model`: "t5"', "tokenizer.json"]),
        ({"tokenizer.ggml.merges": None}, None, ["`tokenizer.ggml.merges` is missing"]),
        ({"tokenizer.ggml.token_type": [1]}, None, ["`tokenizer.ggml.token_type` has 1 values for 640 tokens"]),
        ({"tokenizer.ggml.tokens": ["a"] * 640}, None, ['"a" is there twice']),
        ({"qwen3.block_count": None}, None, ["`qwen3.block_count`: missing"]),
        ({"qwen3.rope.scaling.type": "su"}, None, ["`qwen3.rope.scaling.type`", "linear, yarn"]),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) and value else "",
)
def test_files_that_cannot_be_read_say_why(
    others: dict[str, Any], change: Callable[[bytes], bytes] | None, told: list[str], tmp_path: Path
) -> None:
    file = write_gguf(demo_path(), tmp_path / "model.gguf", **others)
    if change is not None:
        file.write_bytes(change(file.read_bytes()))
    with pytest.raises(LoadError) as caught:
        resolve_model(str(file))
    for part in [str(file), *told]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("name", "others", "told"),
    [
        ("deepseek 3", {"deepseek2.attention.temperature_scale": 0.1}, "queries that grow with their position"),
        ("deepseek 3", {"deepseek2.nextn_predict_layers": 9}, "nextn_predict_layers`: 9 of . layers"),
        (
            "gemma 4, keys as values",
            {"gemma4.attention.sliding_window_pattern": None},
            "4 of them, one for each layer",
        ),
    ],
)
def test_settings_that_are_not_read_say_so(name: str, others: dict[str, Any], told: str, tmp_path: Path) -> None:
    family, settings = FAMILIES[name]
    path = write_tiny_model(tmp_path / "model", family, **settings)
    header = read_header(write_gguf(path, tmp_path / "model.gguf", **TOKENIZER, **others))
    with pytest.raises(LoadError, match=told):
        make_config(header)


def test_projections_from_latents_that_do_not_fit_say_so(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model", V3[0], **V3[1])
    infos = read_gguf(write_gguf(path, tmp_path / "model.gguf", **TOKENIZER))
    values = "model.layers.0.self_attn.v_b_proj.weight"
    infos[values] = msgspec.structs.replace(infos[values], shape=(4, 12, 31))
    with pytest.raises(LoadError, match=r"k_b_proj.weight has shape \[4, 32, 8\], which does not fit \[4, 12, 31\]"):
        join_latents(infos)


def test_files_that_are_missing_or_of_new_types_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(demo_path(), tmp_path / "demo.gguf", split_max_tensors=30)
    first, second, _ = sorted(tmp_path.glob("*.gguf"))
    second.unlink()
    with pytest.raises(LoadError, match=r"00001-of-00003\.gguf: parts 2 of 3 are missing"):
        resolve_model(str(first))
    monkeypatch.delitem(TENSOR_TYPES, 0)
    with pytest.raises(LoadError, match=r"a type that is not known \(ggml's number 0\)"):
        read_gguf(first)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(LoadError, match=r"IQ1_S .* pip install 'nvcli\[gguf\]'"):
        numbers_of_blocks(torch.zeros(1, 50, dtype=torch.uint8), "IQ1_S")


def test_damaged_headers_are_errors_or_are_read(tmp_path: Path) -> None:
    whole = write_gguf(demo_path(), tmp_path / "model.gguf").read_bytes()
    draw = random.Random(0)
    for number in range(30):
        damaged = bytearray(whole)
        for _ in range(draw.choice((1, 4))):
            damaged[draw.randrange(4, 40_000)] = draw.choice((0, 1, 255, draw.randrange(256)))
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(damaged)
        with suppress(LoadError, ConfigError):
            folder = resolve_model(str(file))
            load_model_config(folder)
            read_tensors(folder)
