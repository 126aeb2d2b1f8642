"""Known shapes of models with recurrent states, as their published config.json files have them, text part alone."""

from __future__ import annotations

from typing import Any

_HYBRID: dict[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_scaling": None,
    "max_position_embeddings": 262144,
    "attention_bias": False,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_QWEN3_NEXT: dict[str, Any] = {
    **_HYBRID,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "eos_token_id": 151645,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_QWEN3_5: dict[str, Any] = {**_HYBRID, "vocab_size": 248320, "eos_token_id": 248044}


def _shape(
    base: dict[str, Any], hidden: int, layers: int, heads: int, kv_heads: int, value_heads: int, **keys: Any
) -> dict[str, Any]:
    """`value_heads` are those of the recurrent layers."""
    return {
        **base,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "linear_num_value_heads": value_heads,
        **keys,
    }


def _dense(hidden: int, layers: int, heads: int, value_heads: int, intermediate: int) -> dict[str, Any]:
    names = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    return _shape(_QWEN3_5, hidden, layers, heads, 4, value_heads, **names, intermediate_size=intermediate)


def _experts(num_experts: int, per_token: int) -> dict[str, Any]:
    """Experts of 512 each, and one of the same size that all tokens share."""
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }


HYBRID_SHAPES = {
    "qwen3-next-80b-a3b": _shape(_QWEN3_NEXT, 2048, 48, 16, 2, 32, **_experts(512, 10), intermediate_size=5120),
    "qwen3.5-9b": _dense(4096, 32, 16, 32, 12288),
    "qwen3.5-27b": _dense(5120, 64, 24, 48, 17408),
    "qwen3.5-35b-a3b": _shape(
        _QWEN3_5,
        *(2048, 40, 16, 2, 32),
        **_experts(256, 8),
        architectures=["Qwen3_5MoeForCausalLM"],
        model_type="qwen3_5_moe_text",
    ),
}
