"""Makes config.json of the settings in a GGUF file for families of mixtures of experts.

Settings: github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py; what is changed on the way to a file:
convert_hf_to_gguf.py there. Torch-free.
"""

from __future__ import annotations

from typing import Any

from nvcli.models.gguf.configs import qwen2
from nvcli.models.gguf.settings import FULL, KV_HEADS, SLIDING, Settings, common, experts

_SIGMOID = 2
"""llama.cpp's number of experts that are chosen by sigmoid scores; 1: by a softmax."""
_GROUPS = {160: (8, 3), 256: (8, 4)}
"""Groups of experts, and how many of them a token chooses from, by the number of experts: those of DeepSeek-V2 and V3,
for files from before llama.cpp stored groups. The smaller ones have none."""
_TEMPERATURE = "attention.temperature_scale"


def _experts(found: Settings, *, renormalises: bool) -> dict[str, Any]:
    """Return the keys of Qwen's mixtures of experts."""
    keys = found.keys
    used = keys.positive("expert_used_count")
    size = keys.get("feed_forward_length", int, 0) // used  # of older files
    return {
        **qwen2(found),
        "num_experts": keys.positive("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.positive("expert_feed_forward_length", size or None),
        "norm_topk_prob": renormalises,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def qwen2_moe(found: Settings) -> dict[str, Any]:
    shared = found.keys.get("expert_shared_feed_forward_length", int, 0)
    shared = shared or found.keys.positive("feed_forward_length")  # of older files
    return {**_experts(found, renormalises=False), "shared_expert_intermediate_size": shared}


def qwen3_moe(found: Settings) -> dict[str, Any]:
    return _experts(found, renormalises=True)


def glm4_moe(found: Settings) -> dict[str, Any]:
    has_norms = "blk.0.attn_q_norm.weight" in found.tensors
    return {**common(found), **shared_experts(found), "use_qk_norm": has_norms}


def deepseek2(found: Settings) -> dict[str, Any]:
    """Return DeepSeek-V3's config.json, as GLM-4.7-Flash and Kimi-K2 have it too, or DeepSeek-V2's, or Youtu-LLM's."""
    keys, config = found.keys, latent_attention(found)
    if not keys.get("expert_count", int, 0):
        return {**config, "architectures": ["YoutuForCausalLM"]}
    config |= shared_experts(found)
    if not keys.has("expert_group_count"):
        n_group, topk_group = _GROUPS.get(config["n_routed_experts"], (1, 1))
        config |= {"n_group": n_group, "topk_group": topk_group}
    if keys.has(_TEMPERATURE):
        raise keys.error(_TEMPERATURE, "queries that grow with their position are not supported here; use safetensors")
    if keys.get("expert_gating_func", int, _SIGMOID if found.has_any("exp_probs_b.bias") else 1) == _SIGMOID:
        return config
    kind = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return {**config, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": kind}


def glm_dsa(found: Settings) -> dict[str, Any]:
    """Return GLM-5's config.json. Layers without an indexer take the choice of the layer before them."""
    indexer = found.keys.positive
    layers = (found.has(f"blk.{number}.indexer.attn_k.weight") for number in range(found.num_layers))
    return {
        **latent_attention(found),
        **shared_experts(found),
        "index_n_heads": indexer("attention.indexer.head_count"),
        "index_head_dim": indexer("attention.indexer.key_length"),
        "index_topk": indexer("attention.indexer.top_k"),
        "indexer_types": ["full" if chooses else "shared" for chooses in layers],
    }


def latent_attention(found: Settings) -> dict[str, Any]:
    """Return what latent attention has. In newer files the sizes of heads that it projects to have keys of their own,
    beside those of the latents."""
    keys, rope = found.keys, found.rope()
    rope.pop("partial_rotary_factor", None)
    # Written 0.1 times as large (TAG_DEEPSEEK2_YARN_LOG_MUL_FIX in llama.cpp).
    weight = 10 * keys.get("rope.scaling.yarn_log_multiplier", float, 0.0)
    rope |= {"mscale": weight, "mscale_all_dim": weight} if weight else {}
    rope_dim = keys.positive("rope.dimension_count")
    key_dim, value_dim = (
        keys.positive(f"attention.{one}_length_mla", keys.positive(f"attention.{one}_length"))
        for one in ("key", "value")
    )
    return {
        **common(found),
        "num_key_value_heads": keys.positive("attention.head_count"),
        "head_dim": None,
        "q_lora_rank": keys.get("attention.q_lora_rank", int, 0) or None,
        "kv_lora_rank": keys.positive("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": value_dim,
        "rope_parameters": rope,
        "attention_bias": found.has_bias("attn_q_a"),
    }


def shared_experts(found: Settings) -> dict[str, Any]:
    """Return the keys of mixtures of experts that are like DeepSeek's."""
    keys = found.keys
    return {
        "first_k_dense_replace": keys.get("leading_dense_block_count", int, 0),
        "n_shared_experts": keys.get("expert_shared_count", int, 0),
        **experts(found, "n_routed_experts", size="moe_intermediate_size"),
        "n_group": keys.positive("expert_group_count", 1),
        "topk_group": keys.positive("expert_group_used_count", 1),
        "norm_topk_prob": keys.get("expert_weights_norm", bool, False),
        "routed_scaling_factor": keys.positive_number("expert_weights_scale", 1.0),
        "num_nextn_predict_layers": 0,
    }


def gpt_oss(found: Settings) -> dict[str, Any]:
    config = common(found)
    config["rope_parameters"] |= {"truncate": False}
    return {**config, **experts(found, "num_local_experts", size="intermediate_size")}


def mistral4(found: Settings) -> dict[str, Any]:
    """Return Mistral 4's config.json, which counts the rotated numbers among all of a head."""
    keys, config = found.keys, {**latent_attention(found), **shared_experts(found)}
    head_dim, growth = keys.positive("attention.key_length_mla"), keys.get(_TEMPERATURE, float, 0.0)
    rope = {**config["rope_parameters"], "partial_rotary_factor": config["qk_rope_head_dim"] / head_dim}
    rope |= {"llama_4_scaling_beta": growth} if growth else {}
    return {**config, "head_dim": head_dim, "rope_parameters": rope}


def llama4(found: Settings) -> dict[str, Any]:
    """Return Llama 4's config.json, of which files leave out what all models of the family share. Only the smaller one
    norms queries and keys."""
    keys, config = found.keys, common(found)
    config["rope_parameters"].pop("partial_rotary_factor", None)
    return {
        **config,
        **experts(found, "num_local_experts", size="intermediate_size"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": keys.positive("interleave_moe_layer_step"),
        "use_qk_norm": keys.positive("expert_count") != 128,
    }


def minimax_m2(found: Settings) -> dict[str, Any]:
    sizes = experts(found, "num_local_experts", size="intermediate_size")
    return {**common(found), **sizes, "rotary_dim": found.keys.positive("rope.dimension_count")}


def olmoe(found: Settings) -> dict[str, Any]:
    return {**common(found), **experts(found), "norm_topk_prob": False}


def ernie_moe(found: Settings) -> dict[str, Any]:
    keys, config = found.keys, common(found)
    return {
        **config,
        **experts(found, "moe_num_experts", "moe_k", "moe_intermediate_size"),
        "moe_num_shared_experts": keys.get("expert_shared_count", int, 0),
        "moe_layer_start_index": keys.get("leading_dense_block_count", int, 0),
        "moe_layer_end_index": config["num_hidden_layers"] - 1,
        "moe_layer_interval": keys.positive("interleave_moe_layer_step", 1),
    }


def hunyuan_moe(found: Settings) -> dict[str, Any]:
    sizes = experts(found, used="moe_topk", size="moe_intermediate_size")
    return {**common(found), **sizes, "num_shared_expert": found.keys.positive("expert_shared_count", 1)}


def dots1(found: Settings) -> dict[str, Any]:
    return {**common(found), **shared_experts(found)}


def mimo2(found: Settings) -> dict[str, Any]:
    """Return MiMo-V2's config.json. Layers with windows have other numbers of heads of keys and values than those
    without; values are smaller than keys."""
    keys, config = found.keys, {**common(found), **shared_experts(found), **found.window_types()}
    kinds = config.get("layer_types", [])[: found.num_layers]
    heads = dict(zip(kinds, found.of_layers(KV_HEADS), strict=False))
    rope = config["rope_parameters"]
    of_windows = {**rope, "rope_theta": keys.positive_number("rope.freq_base_swa", 10_000.0)}
    return {
        **config,
        "layer_types": kinds,
        "mlp_layer_types": [
            "sparse" if found.has(f"blk.{number}.ffn_gate_inp.weight") else "dense"
            for number in range(found.num_layers)
        ],
        "num_key_value_heads": heads.get(FULL, config["num_key_value_heads"]),
        "swa_num_key_value_heads": heads.get(SLIDING, config["num_key_value_heads"]),
        "norm_topk_prob": True,
        "v_head_dim": keys.positive("attention.value_length"),
        "attention_value_scale": keys.positive_number("attention.value_scale", 0.707),
        "sliding_window_size": keys.positive("attention.sliding_window"),
        "rope_parameters": {FULL: rope, SLIDING: of_windows},
    }


def afmoe(found: Settings) -> dict[str, Any]:
    """Return AFMoE's config.json, of which files leave out what all models of the family share."""
    keys, config = found.keys, {**common(found), **shared_experts(found)}
    return {
        **config,
        "num_dense_layers": config["first_k_dense_replace"],
        "num_experts": config["n_routed_experts"],
        "num_shared_experts": config["n_shared_experts"],
        "route_scale": keys.positive_number("expert_weights_scale", 1.0),
        "global_attn_every_n_layers": 4,
        "mup_enabled": True,
    }


def exaone_moe(found: Settings) -> dict[str, Any]:
    config = {**common(found), **shared_experts(found), **found.window_types()}
    config["num_shared_experts"] = config.pop("n_shared_experts")
    return config
