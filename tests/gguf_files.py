"""Tiny GGUF files for tests, written by llama.cpp's own library from checkpoints, as its converter does it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor

_ARCHITECTURES = {
    "Llama": "llama",
    "Mixtral": "llama",
    "Ministral3": "mistral3",
    "Lfm2": "lfm2",
    "SmolLM3": "smollm3",
    "Granite": "granite",
    "GraniteMoe": "granitemoe",
    "Qwen2": "qwen2",
    "Qwen2Moe": "qwen2moe",
    "Qwen3": "qwen3",
    "Qwen3Moe": "qwen3moe",
    "Gemma": "gemma",
    "Gemma2": "gemma2",
    "Gemma3": "gemma3",
    "Phi3": "phi3",
    "Olmo2": "olmo2",
    "Olmo3": "olmo2",
    "Exaone4": "exaone4",
    "Glm4": "glm4",
    "Glm4Moe": "glm4moe",
    "Qwen3_5": "qwen35",
    "Qwen3_5Moe": "qwen35moe",
    "SeedOss": "seed_oss",
    "Gemma4": "gemma4",
    "Qwen3Next": "qwen3next",
    "KimiLinear": "kimi-linear",
    "Dots1": "dots1",
    "ExaoneMoe": "exaone-moe",
    "Cohere": "command-r",
    "GptOss": "gpt-oss",
    "Llama4": "llama4",
    "Mistral4": "mistral4",
    "GraniteMoeHybrid": "granitehybrid",
    "Lfm2Moe": "lfm2moe",
    "MiniMaxM2": "minimax-m2",
    "Olmoe": "olmoe",
    "Afmoe": "afmoe",
    "MiMoV2Flash": "mimo2",
    "Ernie4_5": "ernie4_5",
    "Ernie4_5_Moe": "ernie4_5-moe",
    "HunYuanDenseV1": "hunyuan-dense",
    "HunYuanMoEV1": "hunyuan-moe",
    **dict.fromkeys(("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "Youtu"), "deepseek2"),
    "GlmMoeDsa": "glm-dsa",
    "Cohere2": "cohere2",
}
"""llama.cpp's names, by transformers'."""
_PAIRED = ("llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid")
_WITH_OFFSETS = ("gemma", "qwen35", "qwen3next")
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(\w+)\.weight")
_FUSED = re.compile(r"(.*\.experts)\.gate_up_proj")

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_DENSE_COUNTS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_BY_NUMBER = re.compile(r"model\.(layers\.\d+)\.\w+\.experts\.(w\d)")
"""Experts' projections that the converter renames."""

ChooseType = Callable[[str], Type]
"""Chooses the type of a matrix by its name in GGUF."""


def write_gguf(
    path: Path,
    file: Path,
    *,
    architecture: str | None = None,
    choose: ChooseType = lambda name: Type.F32,
    split_max_tensors: int = 0,
    **others: Any,
) -> Path:
    """Write the checkpoint folder `path` as GGUF, in parts of some tensors if that is asked for, with its tokenizer if
    it has one. `architecture` None: that of the family. `others`: metadata, in place of those that follow from the
    folder; None leaves a key out."""
    config = json.loads((path / "config.json").read_text())
    family = config["architectures"][0].removesuffix("ForCausalLM")
    if family == "NemotronH":
        architecture = "nemotron_h_moe" if "moe" in config["layers_block_type"] else "nemotron_h"
    architecture = architecture or _ARCHITECTURES[family]
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=split_max_tensors)
    values = {f"{architecture}.{key}": value for key, value in _metadata(config, architecture).items()}
    for key, value in {**values, **_tokenizer(path, config), **others}.items():
        _add(writer, key, value)
    for name, tensor in _tensors(path, config, architecture):
        kind = choose(name) if tensor.dim() > 1 else Type.F32
        array = tensor.float().contiguous().numpy()
        writer.add_tensor(name, quantise(array, kind), raw_dtype=kind)
    _finish(writer)
    return file


def write_copy(parts: list[Path], file: Path) -> Path:
    """Write a model of several files as one of plain numbers in float32, which the library makes of blocks."""
    file.parent.mkdir()
    readers = [gguf.GGUFReader(part) for part in parts]
    fields = {key: field.contents() for key, field in readers[0].fields.items()}
    writer = gguf.GGUFWriter(file, fields.pop("general.architecture"))
    for key, value in fields.items():
        if not key.startswith(("GGUF.", "split.")):
            _add(writer, key, value)
    for reader in readers:
        for tensor in reader.tensors:
            shape = [int(size) for size in reversed(tensor.shape)]
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
            writer.add_tensor(tensor.name, np.ascontiguousarray(values, dtype=np.float32))
    _finish(writer)
    return file


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(array: np.ndarray, kind: Type) -> np.ndarray:
    """Quantise an array; for types that the library only reads, make blocks up."""
    if kind == Type.F32:
        return array
    try:
        return gguf.quants.quantize(array, kind)
    except NotImplementedError:
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (*array.shape[:-1], array.shape[-1] // block, num_bytes)
        made = np.random.default_rng(array.size).integers(0, 256, shape, dtype=np.uint8)
        for place in _HALVES[kind]:  # scales of a realistic size
            made[..., place : place + 2] = np.frombuffer(np.float16(0.003).tobytes(), np.uint8)
        return made.reshape(*array.shape[:-1], -1)


_HALVES = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
    Type.IQ2_XXS: (0,),
    Type.MXFP4: (),
}
"""The places of scales in float16 in blocks."""


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _metadata(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The keys of an architecture."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    found = {
        "block_count": _num_layers(config),
        "context_length": config.get("max_position_embeddings", config.get("model_max_length")),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size_mlp", config.get("intermediate_size")),
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": config.get("layer_norm_eps"),
        "attention.sliding_window": config.get("sliding_window"),
        "attention.scale": config.get("attention_multiplier"),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "expert_count": next(filter(None, map(config.get, _EXPERT_COUNTS)), None),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_shared_count": next((config[key] for key in _SHARED_COUNTS if key in config), None),
        "expert_weights_norm": config.get("norm_topk_prob"),
        "expert_weights_scale": config.get("routed_scaling_factor", config.get("route_scale")),
        "leading_dense_block_count": next(
            (config[key] for key in _DENSE_COUNTS if key in config), config.get("mlp_layer_types", []).count("dense")
        ),
        "interleave_moe_layer_step": config.get("interleave_moe_layer_step", config.get("moe_layer_interval")),
        "full_attention_interval": config.get("full_attention_interval"),
        "ssm.conv_kernel": config.get("linear_conv_kernel_dim"),
        "ssm.state_size": config.get("linear_key_head_dim"),
        "ssm.group_count": config.get("linear_num_key_heads"),
        "ssm.time_step_rank": config.get("linear_num_value_heads"),
        "expert_used_count": config.get("num_experts_per_tok", _other_used(config)),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "logit_scale": config.get("logits_scaling", config.get("logit_scale")),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
    }
    if architecture in ("gpt-oss", "llama4", "minimax-m2", "hunyuan-moe"):
        found["expert_feed_forward_length"] = config["intermediate_size"]
    if architecture == "granitehybrid":
        found |= _mamba(config, "mamba_d_state", "mamba_d_conv", "mamba_n_groups", "mamba_n_heads", "mamba_d_head")
        found["attention.head_count_kv"] = [2 * (kind == "full_attention") for kind in config["layer_types"]]
        found["expert_shared_feed_forward_length"] = config["shared_intermediate_size"]
    if architecture.startswith("nemotron_h"):
        found |= _nemotron(config)
    if architecture == "gemma4":
        found |= _gemma4(config)
    if architecture == "glm-dsa":
        sizes = {"head_count": "index_n_heads", "key_length": "index_head_dim", "top_k": "index_topk"}
        found |= {f"attention.indexer.{key}": config[name] for key, name in sizes.items()}
    if architecture == "mimo2":
        found |= _mimo2(config)
    if architecture == "kimi-linear":
        found |= _latents(config, rope)
        found["attention.head_count_kv"] = [int(kind == "full_attention") for kind in config["layer_types"]]
        found["kda.head_dim"], found["ssm.conv_kernel"] = config["linear_head_dim"], config["linear_conv_kernel_dim"]
    elif "kv_lora_rank" in config:
        found |= _latents(config, rope)
    if rope.get("rope_type", "default") in ("linear", "yarn"):
        found["rope.scaling.type"] = rope["rope_type"]
        found["rope.scaling.factor"] = float(rope["factor"])
        found["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
        found["rope.scaling.yarn_log_multiplier"] = rope.get("mscale_all_dim", 0.0) * (
            0.1 if "kv_lora_rank" in config else 1.0
        )
        found["attention.temperature_scale"] = rope.get("llama_4_scaling_beta")
    if "conv_L_cache" in config:
        kinds = config["layer_types"]
        found["attention.head_count_kv"] = [config["num_key_value_heads"] if "full" in kind else 0 for kind in kinds]
        found["attention.layer_norm_rms_epsilon"] = config["norm_eps"]
        found["shortconv.l_cache"] = config["conv_L_cache"]
    if "linear_value_head_dim" in config:
        found["ssm.inner_size"] = config["linear_value_head_dim"] * config["linear_num_value_heads"]
    if rope.get("rope_type") == "longrope":
        found["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
    if config.get("sliding_window") and "layer_types" in config:
        found["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    return found


def _other_used(config: Mapping[str, Any]) -> int | None:
    """Return the number of a token's experts where it has another name."""
    found = config.get("moe_topk", config.get("moe_k", config.get("num_experts_per_token")))
    return found[0] if isinstance(found, list) else found


def _num_layers(config: Mapping[str, Any]) -> int:
    return config.get("num_hidden_layers") or len(config["layers_block_type"])


def _mamba(config: Mapping[str, Any], state: str, taps: str, groups: str, heads: str, size: str) -> dict[str, Any]:
    """The keys of Mamba-2, whose names in config.json are given."""
    return {
        "ssm.state_size": config[state],
        "ssm.conv_kernel": config[taps],
        "ssm.group_count": config[groups],
        "ssm.time_step_rank": config[heads],
        "ssm.inner_size": config[heads] * config[size],
    }


def _nemotron(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of Nemotron-H, which say of each layer whether it is attention or an MLP."""
    kinds = config["layers_block_type"]
    size = config["moe_intermediate_size" if "moe" in kinds else "intermediate_size"]
    found = _mamba(config, "ssm_state_size", "conv_kernel", "n_groups", "mamba_num_heads", "mamba_head_dim")
    found["attention.head_count_kv"] = [2 * (kind == "full_attention") for kind in kinds]
    found["attention.layer_norm_rms_epsilon"] = config["layer_norm_epsilon"]
    found["feed_forward_length"] = [size * (kind in ("moe", "mlp")) for kind in kinds]
    if "moe" not in kinds:
        return {**found, "expert_count": None}
    found["expert_shared_feed_forward_length"] = config["moe_shared_expert_intermediate_size"]
    return {**found, "moe_latent_size": config["moe_latent_size"]}


def _gemma4(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of Gemma 4, whose layers differ."""
    count, shared, size = config["num_hidden_layers"], config["num_kv_shared_layers"], config["intermediate_size"]
    layers = [config["per_layer_config"].get(str(number), {}) for number in range(count)]
    heads = [layer.get("num_key_value_heads", config["num_key_value_heads"]) for layer in layers]
    full = next(layer["head_dim"] for layer in layers if "head_dim" in layer)
    return {
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "attention.key_length": full,
        "attention.key_length_swa": config["head_dim"],
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "expert_used_count": config["top_k_experts"],
        "rope.dimension_count": full,
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "feed_forward_length": [size] * (count - shared) + [2 * size] * shared if shared else size,
    }


def _mimo2(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of MiMo-V2, of which published files have windows that count one key less."""
    heads = {"full_attention": config["num_key_value_heads"], "sliding_attention": 2 * config["num_key_value_heads"]}
    return {
        "attention.head_count_kv": [heads[kind] for kind in config["layer_types"]],
        "attention.value_length": config["v_head_dim"],
        "attention.value_scale": config["attention_value_scale"],
        "attention.sliding_window": config["sliding_window"] - 1,
        "rope.freq_base_swa": float(config["rope_parameters"]["sliding_attention"]["rope_theta"]),
    }


def _latents(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of latent attention, which llama.cpp computes with one key for all heads."""
    latents, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": latents,
        "attention.key_length": latents + rope_dim,
        "attention.value_length": latents,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope_dim,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rope_dim,
    }


def _tensors(path: Path, config: Mapping[str, Any], architecture: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint under llama.cpp's names, as its converter changes them."""
    stored = load_file(path / "model.safetensors")
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(number, _num_layers(config))
    stacks: dict[str, list[Tensor]] = {}
    if architecture == "gpt-oss":
        stored = dict(_gpt_oss(stored))
    elif architecture == "llama4":
        stored = {name: one.transpose(1, 2) if one.dim() == 3 else one for name, one in stored.items()}
    for name, tensor in stored.items():
        if config["tie_word_embeddings"] and name == "lm_head.weight":
            continue
        if found := _EXPERT.fullmatch(name):
            stacks.setdefault(f"{found[1]}.{found[2]}", []).append(tensor)
        elif (found := _FUSED.fullmatch(name)) and architecture not in ("gemma4", "mistral4"):
            gate, up = tensor.chunk(2, dim=1)
            stacks |= {f"{found[1]}.gate_proj": [*gate], f"{found[1]}.up_proj": [*up]}
        elif name.endswith(("experts.down_proj", "experts.gate_up_proj")):
            stacks[name] = [*tensor]
        elif name.endswith("moe.input_linear.weight"):  # Granite's
            gate, up = tensor.chunk(2, dim=1)
            experts = f"{name.split('.block')[0]}.mlp.experts"
            stacks |= {f"{experts}.gate_proj": [*gate], f"{experts}.up_proj": [*up]}
        elif name.endswith("shared_mlp.input_linear.weight"):
            end = "_shexp" if config["num_local_experts"] else ""
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                yield f"blk.{name.split('.')[2]}.ffn_{part}{end}.weight", half
        elif name.endswith("shared_mlp.output_linear.weight") and not config["num_local_experts"]:
            yield f"blk.{name.split('.')[2]}.ffn_down.weight", tensor
        elif name.endswith("moe.output_linear.weight"):
            stacks[f"{name.split('.block')[0]}.mlp.experts.down_proj"] = [*tensor]
        elif name.endswith("in_proj_qkvz.weight"):
            for part, matrix in _split_heads(tensor, config):
                yield from _renamed(names, name.replace("qkvz", part), matrix)
        elif name.endswith("kv_b_proj.weight"):
            for part, matrix in split_latents(tensor, config):
                yield from _renamed(names, name.replace("kv_b", part), matrix)
        else:
            yield from _renamed(names, name, _changed(name, tensor, config, architecture))
    for name, experts in stacks.items():
        yield from _renamed(names, f"{name}.weight", torch.stack(experts))
    rope = config.get("rope_parameters") or {}
    if architecture == "gemma4":
        yield "rope_freqs.weight", torch.tensor([1.0] * 4 + [1e30] * 12)  # a quarter of the full layers' heads of 32
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(rope, config)
    for length in ("short", "long"):
        if f"{length}_factor" in rope:
            yield f"rope_factors_{length}.weight", torch.tensor(rope[f"{length}_factor"])


def _split_heads(tensor: Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Qwen3-Next's projections, which are fused for each key head, as two."""
    keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value_dim = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    parts = tensor.view(keys, -1, tensor.shape[1]).split([key_dim, key_dim, value_dim, value_dim], dim=1)
    q, k, v, z = (part.flatten(0, 1) for part in parts)
    yield from (("qkv", torch.cat((q, k, v))), ("z", z))


def split_latents(tensor: Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The projection from latents as two, for keys, transposed, and values: with a matrix for each head."""
    sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
    keys, values = tensor.view(-1, sum(sizes), tensor.shape[1]).split(sizes, dim=1)
    yield from (("k_b", keys.transpose(1, 2)), ("v_b", values))


def _gpt_oss(stored: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield gpt-oss's tensors with gates and up projections apart, and experts as matrices [out, in]."""
    for name, tensor in stored.items():
        if "_proj" in name and ".experts." in name:
            base, is_bias, _ = name.partition("_proj_bias")
            tensor, kind = (tensor, "bias") if is_bias else (tensor.transpose(1, 2), "weight")
            base = base.removesuffix("_proj")
            parts = {"gate": tensor[:, ::2], "up": tensor[:, 1::2]} if base.endswith("gate_up") else {"down": tensor}
            yield from ((f"{base.rpartition('.')[0]}.{part}_proj.{kind}", one) for part, one in parts.items())
        else:
            yield f"{name}.weight" if name.endswith("sinks") else name, tensor


def _renamed(names: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name.endswith("router.scale"):
        yield name.replace("model.layers", "blk").replace("router.scale", "ffn_gate_inp.scale"), tensor
        return
    if name.endswith("per_expert_scale"):
        yield name.replace("model.layers", "blk").replace("router.per_expert_scale", "ffn_down_exps.scale"), tensor
        return
    name = f"{name}.weight" if name.endswith(("layer_scalar", "attention_sink_bias")) else name
    if name.endswith(("e_score_correction_bias", "dt_bias")):  # which the converter spells in another way
        name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace("dt_bias", "dt_proj.bias")
    name = f"{name}.bias" if name.endswith("expert_bias") else _BY_NUMBER.sub(r"\1.feed_forward.experts.\2", name)
    if re.search(r"block_sparse_moe\.\w+_proj", name):  # transformers' name of Kimi Linear's dense MLP
        name = name.replace("block_sparse_moe", "mlp")
    if ".mixer.experts." in name:
        name = name.replace("backbone", "model").replace("mixer", "mlp")
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    yield found, tensor


def _changed(name: str, tensor: Tensor, config: Mapping[str, Any], architecture: str) -> Tensor:
    if architecture in _PAIRED and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    if architecture == "qwen3next" and ".linear_attn." in name:
        return -tensor.exp() if name.endswith("A_log") else tensor.squeeze(1) if "conv1d" in name else tensor
    if architecture.startswith("qwen35") and ".linear_attn." in name:
        return _tiled(name.split(".linear_attn.")[1], tensor, config)
    if (
        architecture.startswith(("gemma", "qwen35", "qwen3next"))
        and architecture != "gemma4"
        and name.endswith("norm.weight")
    ):
        return tensor + 1
    if architecture == "kimi-linear" and name.endswith(("A_log", "conv1d.weight")):
        return -tensor.exp() if name.endswith("A_log") else tensor.squeeze(1)[None, :, None]
    if ".mamba." in name or ".mixer." in name:
        return _as_mamba(name, tensor, config)
    if name.endswith("moe_statics.e_score_correction_bias"):
        return tensor[0]
    if name.endswith("conv.conv.weight"):
        return tensor.squeeze(1)
    if name.endswith("shared_expert_gate.weight"):
        return tensor[0]
    return tensor


def _as_mamba(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Change a tensor of Mamba-2, or of another block of Nemotron-H."""
    if name.endswith("A_log"):
        return -tensor.exp().unsqueeze(1)
    if name.endswith(".D"):
        return tensor.unsqueeze(1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return tensor.view(config.get("n_groups", config.get("mamba_n_groups")), -1)
    return tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor


def _tiled(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Put the value heads of a delta net in llama.cpp's order: the first of each key head, then the second."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if name == "out_proj.weight":
        return _tiled("in_proj_z.weight", tensor.t(), config).t()
    if name == "norm.weight":
        return tensor
    if name == "A_log":
        tensor = -tensor.exp()
    if name == "conv1d.weight":
        tensor = tensor.squeeze(1)
    is_whole = name in ("in_proj_qkv.weight", "in_proj_z.weight", "conv1d.weight")
    size = config["linear_value_head_dim"] if is_whole else 1
    before, own = tensor.split([len(tensor) - values * size, values * size])
    grouped = own.reshape(keys, values // keys, size, *own.shape[1:])
    return torch.cat((before, grouped.transpose(0, 1).reshape(own.shape)))


def _llama3_factors(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Tensor:
    """The divisors of Llama 3's frequencies, by its formula."""
    size = config["head_dim"]
    wavelengths = 2 * torch.pi * rope["rope_theta"] ** (torch.arange(0, size, 2) / size)
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / rope["factor"] + smooth)


def _tokenizer(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer of a folder that has a byte-level one, which splits text as Qwen2's does."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return {}
    found = json.loads(file.read_text())
    ids = found["model"]["vocab"] | {token["content"]: token["id"] for token in found["added_tokens"]}
    special = {token["content"] for token in found["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    template = path / "chat_template.jinja"
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in found["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": template.read_text() if template.is_file() else None,
    }
