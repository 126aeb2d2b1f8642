"""Makes config.json of the settings in a GGUF file for families that have other layers beside attention.

Settings: github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py; what is changed on the way to a file:
convert_hf_to_gguf.py there. Torch-free.
"""

from __future__ import annotations

from typing import Any

from nvcli.errors import LoadError
from nvcli.models.gguf.configs import granite, qwen2
from nvcli.models.gguf.expert_configs import latent_attention, qwen2_moe, shared_experts
from nvcli.models.gguf.settings import FULL, KV_HEADS, LINEAR, Settings, common, experts


def lfm2(found: Settings) -> dict[str, Any]:
    config = common(found)
    return {
        **config,
        "layer_types": [FULL if count else "conv" for count in found.of_layers(KV_HEADS)],
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": found.keys.positive("shortconv.l_cache"),
        "conv_bias": found.has_any("shortconv.in_proj.bias"),
    }


def qwen35(found: Settings) -> dict[str, Any]:
    keys = found.keys
    num_values = keys.positive("ssm.time_step_rank")
    sizes = {
        "full_attention_interval": keys.positive("full_attention_interval", 4),
        "linear_num_key_heads": keys.positive("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_key_head_dim": keys.positive("ssm.state_size"),
        "linear_value_head_dim": keys.positive("ssm.inner_size") // num_values,
        "linear_conv_kernel_dim": keys.positive("ssm.conv_kernel"),
        "mtp_num_hidden_layers": 0,
    }
    return {**qwen2(found), **sizes}


def qwen35_moe(found: Settings) -> dict[str, Any]:
    return {**qwen2_moe(found), **qwen35(found)}


def qwen3_next(found: Settings) -> dict[str, Any]:
    """Return Qwen 3.5's config.json, as which newer files have Qwen3-Next's projections."""
    if found.has_any("ssm_in.weight"):
        raise LoadError(
            f"{found.header.file}: Qwen3-Next as early versions of llama.cpp stored it (tensors ssm_in), which is not "
            "read: download a newer file"
        )
    return qwen35_moe(found)


def lfm2_moe(found: Settings) -> dict[str, Any]:
    keys = found.keys
    return {
        **lfm2(found),
        **experts(found, size="moe_intermediate_size"),
        "num_dense_layers": keys.get("leading_dense_block_count", int, 0),
        "norm_topk_prob": True,
        "routed_scaling_factor": keys.positive_number("expert_weights_scale", 1.0),
        "use_expert_bias": found.has_any("exp_probs_b.bias"),
    }


def granite_hybrid(found: Settings) -> dict[str, Any]:
    keys, heads = found.keys, found.of_layers(KV_HEADS)
    rotates = keys.get("rope.scaling.finetuned", bool, False)
    shared = keys.get("expert_shared_feed_forward_length", int, 0) or keys.positive("feed_forward_length")
    inner = keys.positive("ssm.inner_size")
    return {
        **granite(found),
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["attention" if count else "mamba" for count in heads],
        "position_embedding_type": "rope" if rotates else "nope",
        "shared_intermediate_size": shared,
        "num_local_experts": keys.get("expert_count", int, 0),
        "num_experts_per_tok": keys.get("expert_used_count", int, 0) or None,
        "mamba_n_heads": keys.positive("ssm.time_step_rank"),
        "mamba_d_head": inner // keys.positive("ssm.time_step_rank"),
        "mamba_expand": inner // keys.positive("embedding_length"),
        "mamba_n_groups": keys.positive("ssm.group_count"),
        "mamba_d_state": keys.positive("ssm.state_size"),
        "mamba_d_conv": keys.positive("ssm.conv_kernel"),
        "mamba_conv_bias": found.has_any("ssm_conv1d.bias"),
        "mamba_proj_bias": found.has_any("ssm_in.bias"),
    }


def nemotron_h(found: Settings) -> dict[str, Any]:
    """Return Nemotron-H's config.json, with or without experts; each of its layers is one block."""
    keys, heads, sizes = found.keys, found.of_layers(KV_HEADS), found.of_layers("feed_forward_length")
    config, num_experts = common(found), keys.get("expert_count", int, 0)
    mlp = "moe" if num_experts else "mlp"
    num_heads = keys.positive("ssm.time_step_rank")
    kinds = ("attention" if count else mlp if size else "mamba" for count, size in zip(heads, sizes, strict=True))
    config |= {
        "layers_block_type": [*kinds],
        "intermediate_size": max(sizes) or None,
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": num_heads,
        "mamba_head_dim": keys.positive("ssm.inner_size") // num_heads,
        "n_groups": keys.positive("ssm.group_count"),
        "ssm_state_size": keys.positive("ssm.state_size"),
        "conv_kernel": keys.positive("ssm.conv_kernel"),
        "use_conv_bias": found.has_any("ssm_conv1d.bias"),
        "use_bias": found.has_any("ssm_in.bias"),
        "attention_bias": found.has_any("attn_q.bias"),
        "mlp_bias": found.has_any("ffn_up.bias"),
        "mlp_hidden_act": "relu2",
    }
    if not num_experts:
        return config
    return {
        **config,
        **experts(found, "n_routed_experts", size="moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": keys.positive("expert_shared_feed_forward_length"),
        "moe_latent_size": keys.get("moe_latent_size", int, 0) or None,
        "norm_topk_prob": keys.get("expert_weights_norm", bool, True),
        "routed_scaling_factor": keys.positive_number("expert_weights_scale", 1.0),
        "n_group": keys.positive("expert_group_count", 1),
        "topk_group": keys.positive("expert_group_used_count", 1),
    }


def kimi_linear(found: Settings) -> dict[str, Any]:
    """Return Kimi Linear's config.json; the number of heads of Kimi Delta Attention follows from its biases."""
    keys, heads = found.keys, found.of_layers(KV_HEADS)
    head_dim = keys.positive("kda.head_dim")
    biases = next((found.header.tensor(name) for name in found.tensors if name.endswith(".ssm_dt.bias")), None)
    return {
        **latent_attention(found),
        **shared_experts(found),
        "norm_topk_prob": True,
        "layer_types": [FULL if count else LINEAR for count in heads],
        "linear_head_dim": head_dim,
        "linear_num_heads": None if biases is None else biases.shape[-1] // head_dim,
        "linear_conv_kernel_dim": keys.positive("ssm.conv_kernel"),
    }
