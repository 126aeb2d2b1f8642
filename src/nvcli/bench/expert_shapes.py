"""Known shapes of mixtures of experts beside Qwen3's and gpt-oss, as their published config.json files have them; of
one that reads images, the settings of its text part."""

from __future__ import annotations

from typing import Any

_EXPERTS: dict[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_MIXTRAL: dict[str, Any] = {
    **_EXPERTS,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "eos_token_id": 2,
}
_QWEN2_MOE: dict[str, Any] = {
    **_EXPERTS,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": 151936,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "max_position_embeddings": 32768,
    "eos_token_id": 151645,
}
_GLM4_5: dict[str, Any] = {
    **_EXPERTS,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "vocab_size": 151552,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 131072,
    "num_nextn_predict_layers": 1,
    "eos_token_id": [151329, 151336, 151338],
}


def _shape(base: dict[str, Any], hidden: int, layers: int, intermediate: int, **keys: Any) -> dict[str, Any]:
    return {**base, "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate, **keys}


EXPERT_SHAPES = {
    "mixtral-8x7b": _shape(
        _MIXTRAL, 4096, 32, 14336, num_attention_heads=32, vocab_size=32000, max_position_embeddings=32768
    ),
    "mixtral-8x22b": _shape(
        _MIXTRAL, 6144, 56, 16384, num_attention_heads=48, vocab_size=32768, max_position_embeddings=65536
    ),
    "qwen1.5-moe-a2.7b": _shape(
        _QWEN2_MOE,
        *(2048, 24, 5632),
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        max_position_embeddings=8192,
    ),
    "qwen2-57b-a14b": _shape(
        _QWEN2_MOE,
        *(3584, 28, 18944),
        num_attention_heads=28,
        num_key_value_heads=4,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480,
    ),
    "olmoe-1b-7b": _shape(
        _EXPERTS,
        *(2048, 16, 1024),
        architectures=["OlmoeForCausalLM"],
        model_type="olmoe",
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        vocab_size=50304,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        clip_qkv=None,
        max_position_embeddings=4096,
        eos_token_id=50279,
    ),
    "gemma-4-26b-a4b": _shape(
        {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "torch_dtype": "bfloat16"},
        *(2816, 30, 2112),
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        num_global_key_value_heads=2,
        global_head_dim=512,
        attention_k_eq_v=True,
        sliding_window=1024,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        hidden_size_per_layer_input=0,
        hidden_activation="gelu_pytorch_tanh",
        final_logit_softcapping=30.0,
        vocab_size=262144,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=262144,
        eos_token_id=[1, 106],
    ),
    "glm-4.5-air": _shape(
        _GLM4_5,
        *(4096, 46, 10944),
        n_routed_experts=128,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        use_qk_norm=False,
    ),
    "glm-4.5": _shape(
        _GLM4_5,
        *(5120, 92, 12288),
        n_routed_experts=160,
        moe_intermediate_size=1536,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
}
