"""Makes config.json of the settings in a GGUF file, with a function for each family that has keys of its own.

Settings: github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py; what is changed on the way to a file:
convert_hf_to_gguf.py there. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvcli.models.gguf.settings import FULL, KV_HEADS, SLIDING, Settings, common, experts

_LAYER_EMBEDDING = "per_layer_token_embd.weight"


def llama(found: Settings) -> dict[str, Any]:
    keys = found.keys
    whole_heads = keys.positive("rope.dimension_count") if keys.has("rope.dimension_count") else None
    config = {**common(found), "sliding_window": None, "head_dim": found.head_dim or whole_heads}
    config["rope_parameters"].pop("partial_rotary_factor", None)
    if not keys.get("expert_count", int, 0):
        return config
    return {**config, "architectures": ["MixtralForCausalLM"], **experts(found, "num_local_experts")}


def mistral3(found: Settings) -> dict[str, Any]:
    keys, config = found.keys, llama(found)
    weight = keys.get("rope.scaling.yarn_log_multiplier", float, 0.0)
    growth = keys.get("attention.temperature_scale", float, 0.0)
    config["rope_parameters"] |= {"mscale": weight, "mscale_all_dim": weight} if weight else {}
    config["rope_parameters"] |= {"llama_4_scaling_beta": growth} if growth else {}
    return config


def qwen2(found: Settings) -> dict[str, Any]:
    return {**common(found), "sliding_window": None}  # llama.cpp has no windows for it


def glm4(found: Settings) -> dict[str, Any]:
    sections = "rope.dimension_sections"
    if found.keys.has(sections):
        raise found.keys.error(sections, "the text part of GLM-4V is not supported in GGUF; supported: GLM-4")
    return common(found)


def gemma2(found: Settings) -> dict[str, Any]:
    keys, config = found.keys, common(found)
    return {
        **config,
        "query_pre_attn_scalar": _query_scalar(config, largest=46),
        "attn_logit_softcapping": keys.positive_number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.positive_number("final_logit_softcapping", 30.0),
        **found.window_types(),
    }


def gemma3(found: Settings) -> dict[str, Any]:
    keys, config = found.keys, common(found)
    local = {"rope_type": "default", "rope_theta": keys.positive_number("rope.freq_base_swa", 10_000.0)}
    return {
        **config,
        "query_pre_attn_scalar": _query_scalar(config, largest=62),
        "rope_parameters": {FULL: config["rope_parameters"], SLIDING: local},
        "final_logit_softcapping": keys.get("final_logit_softcapping", float, 0.0) or None,
        **found.window_types(),
    }


def gemma4(found: Settings) -> dict[str, Any]:
    """Return Gemma 4's, whose layers without windows have heads and frequencies of their own."""
    keys, windows = found.keys, found.of_layers("attention.sliding_window_pattern")
    kinds = [SLIDING if one else FULL for one in windows]
    of_kind = dict(zip(reversed(kinds), reversed(found.of_layers(KV_HEADS)), strict=True))
    sizes = found.of_layers("feed_forward_length")
    config = common(found)
    turned = [1.0 if factor == 1.0 else 0.0 for factor in found.header.read_floats("rope_freqs.weight")]
    no_values = [number for number in range(found.num_layers) if not found.has(f"blk.{number}.attn_v.weight")]
    num_experts, inputs = keys.get("expert_count", int, 0), keys.get("embedding_length_per_layer_input", int, 0)
    return {
        **config,
        "layer_types": kinds,
        "head_dim": keys.positive("attention.key_length_swa"),
        "global_head_dim": keys.positive("attention.key_length"),
        "num_key_value_heads": of_kind.get(SLIDING, config["num_key_value_heads"]),
        "num_global_key_value_heads": of_kind.get(FULL),
        "attention_k_eq_v": any(found.has(f"blk.{number}.attn_k.weight") for number in no_values),
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", int, 0),
        "use_double_wide_mlp": sizes[-1] == 2 * sizes[0],
        "rope_parameters": {
            FULL: {
                "rope_type": "proportional",
                "rope_theta": keys.positive_number("rope.freq_base"),
                "partial_rotary_factor": sum(turned) / len(turned),
            },
            SLIDING: {"rope_type": "default", "rope_theta": keys.positive_number("rope.freq_base_swa", 10_000.0)},
        },
        "final_logit_softcapping": keys.get("final_logit_softcapping", float, 0.0) or None,
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": found.header.tensor(_LAYER_EMBEDDING).shape[0] if inputs else None,
        "enable_moe_block": num_experts > 0,
        "num_experts": num_experts or None,
        "top_k_experts": keys.get("expert_used_count", int, 0) or None,
        "moe_intermediate_size": keys.get("expert_feed_forward_length", int, 0) or None,
    }


def _query_scalar(config: Mapping[str, Any], *, largest: int) -> float:
    """Return `query_pre_attn_scalar`, which files leave out: in the largest model of a family, which has so many
    layers, it is not the size of a head."""
    share: float = config["hidden_size"] / config["num_attention_heads"]
    return share if config["num_hidden_layers"] == largest else float(config["head_dim"] or share)


def granite(found: Settings) -> dict[str, Any]:
    keys = found.keys
    scales = {
        "attention_multiplier": keys.positive_number("attention.scale", 1.0),
        "embedding_multiplier": keys.positive_number("embedding_scale", 1.0),
        "residual_multiplier": keys.positive_number("residual_scale", 1.0),
        "logits_scaling": keys.positive_number("logit_scale", 1.0),
    }
    return {**llama(found), **scales}


def granite_moe(found: Settings) -> dict[str, Any]:
    shared = found.keys.get("expert_shared_feed_forward_length", int, 0)
    return {**granite(found), "architectures": ["GraniteMoeForCausalLM"], "shared_intermediate_size": shared}


def phi3(found: Settings) -> dict[str, Any]:
    config = common(found)
    original = config["rope_parameters"].get("original_max_position_embeddings", config["max_position_embeddings"])
    return {**config, "original_max_position_embeddings": original}


def olmo2(found: Settings) -> dict[str, Any]:
    config = {**common(found), **found.window_types()}
    if config["sliding_window"] is None:
        return config
    rope = config.pop("rope_parameters")  # stretched in layers without windows alone
    scaling = None if rope["rope_type"] == "default" else rope
    return {**config, "architectures": ["Olmo3ForCausalLM"], "rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def cohere(found: Settings) -> dict[str, Any]:
    return {
        **common(found),
        "layer_norm_eps": found.keys.positive_number("attention.layer_norm_epsilon"),
        "logit_scale": found.keys.positive_number("logit_scale"),
        "use_qk_norm": found.has("blk.0.attn_q_norm.weight"),
    }


def cohere2(found: Settings) -> dict[str, Any]:
    return {**cohere(found), **found.window_types()}


def seed_oss(found: Settings) -> dict[str, Any]:
    return {**common(found), "attention_out_bias": found.has_bias("attn_output")}


def exaone4(found: Settings) -> dict[str, Any]:
    return {**common(found), **found.window_types()}


def ernie(found: Settings) -> dict[str, Any]:
    return {**common(found), "use_bias": found.has_bias("attn_q")}
