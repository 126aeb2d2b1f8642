"""Tiny mixtures of experts for the tests of parity: the names of transformers' families, and their arguments."""

from __future__ import annotations

from typing import Any

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

_EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 32}
LATENTS: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 12,
}
_LATENT_EXPERTS = {**_EXPERTS, **LATENTS, "n_routed_experts": 8, "num_hidden_layers": 3}
_CHOICE = {"index_topk": 8, "index_n_heads": 24, "index_head_dim": 24}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}

GPT_OSS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 20,
    "swiglu_limit": 1.0,  # so that something is clamped
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
}

_GRANITE = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 32,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.5,
    "embedding_scale": 0.4,
}

EXPERT_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 moe": ("Qwen3Moe", {**_EXPERTS, "num_experts": 8, "norm_topk_prob": True}),
    "qwen3 moe, dense layers, not renormalised": (
        "Qwen3Moe",
        {**_EXPERTS, "num_experts": 6, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    "qwen 3-vl moe": (
        "Qwen3VLMoe",
        {
            **_EXPERTS,
            "num_experts": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
        },
    ),
    "qwen2 moe": ("Qwen2Moe", {**_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 40}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "head_dim": 8}),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gemma 4 with vision, experts beside an mlp": (
        "Gemma4",
        {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
            "sliding_window": 20,
            "rope_parameters": None,
            "attention_k_eq_v": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, SLIDING, FULL],
        },
    ),
    "glm 4.6v": (
        "Glm4vMoe",
        {
            **_EXPERTS,
            "num_hidden_layers": 3,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 2],
            },
        },
    ),
    "glm 4.5": (
        "Glm4Moe",
        {
            **_EXPERTS,
            "num_hidden_layers": 3,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "granite 3 moe": ("GraniteMoe", {**_GRANITE, "head_dim": 8}),
    "granite moe with windows, a shared expert": (
        "GraniteMoeSWA",
        {
            **_GRANITE,
            "head_dim": 8,
            "shared_intermediate_size": 40,
            "sliding_window": 20,
            "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, SLIDING],
            "layer_rope_theta": [0, 1e3, 1e4],
        },
    ),
    "phi-3.5-moe, longrope of short runs": (
        "Phimoe",
        {
            "num_local_experts": 6,
            "intermediate_size": 32,
            "router_jitter_noise": 0.2,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 40,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 70,
                "short_factor": [1.0, 1.1, 1.2, 1.5],
                "long_factor": [1.5, 2.0, 3.0, 5.0],
                "short_mscale": 1.2,
                "long_mscale": 1.3,
            },
            "head_dim": 8,
        },
    ),
    "llama 4 with vision": (
        "Llama4",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "intermediate_size": 48,
            "intermediate_size_mlp": 40,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "interleave_moe_layer_step": 2,
            "floor_scale": 8,
            "attn_scale": 0.4,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
            },
            "hidden_size": 64,
        },
    ),
    "mimo v2 flash": (
        "MiMoV2Flash",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "layer_types": [FULL, SLIDING, SLIDING, FULL],
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "num_key_value_heads": 1,
            "sliding_window": 20,
            "v_head_dim": 12,
            "n_routed_experts": 8,
            "routed_scaling_factor": None,
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
                SLIDING: {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "dbrx": (
        "Dbrx",
        {
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 3},
            "hidden_size": 64,
            "d_model": 64,
            "head_dim": None,
        },
    ),
    "minimax text 01": (
        "MiniMax",
        {
            "layer_types": [LINEAR, FULL, LINEAR],
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "block_size": 16,
            "full_attn_alpha_factor": 2.0,
            "full_attn_beta_factor": 0.7,
            "linear_attn_alpha_factor": 1.5,
            "linear_attn_beta_factor": 1.3,
            "mlp_alpha_factor": 3.0,
            "mlp_beta_factor": 0.5,
        },
    ),
    "minimax m2": ("MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 8}),
    "ernie 4.5 moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2,
            "num_hidden_layers": 3,
        },
    ),
    "hunyuan v1 moe": ("HunYuanMoEV1", {"num_experts": 6, "moe_topk": [3, 3]}),
    "afmoe": (
        "Afmoe",
        {
            **_EXPERTS,
            "num_experts": 6,
            "num_shared_experts": 2,
            "route_scale": 1.7,
            "sliding_window": 20,
            "global_attn_every_n_layers": 2,
            "num_hidden_layers": 4,
            "mup_enabled": True,
        },
    ),
    "laguna": (
        "Laguna",
        {
            **_EXPERTS,
            "num_experts": 6,
            "shared_expert_intermediate_size": 24,
            "moe_routed_scaling_factor": 1.7,
            "sliding_window": 20,
            "num_attention_heads_per_layer": [4, 8, 4],
            "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, FULL],
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
                SLIDING: {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 1.0},
            },
        },
    ),
    "laguna, a gate for each number": (
        "Laguna",
        {**_EXPERTS, "num_experts": 6, "gating": "per-element", "rope_parameters": None},
    ),
    "beam": (
        "Beam",
        {
            **_EXPERTS,
            "num_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "rms_norm_eps": 0.01,
            "sliding_window": 20,
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, FULL, FULL],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": None,
        },
    ),
    "mellum 2": (
        "Mellum",
        {
            **_EXPERTS,
            "num_experts": 6,
            "sliding_window": 20,
            "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, SLIDING],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": None,
        },
    ),
    "flint": (
        "Flint",
        {
            **_EXPERTS,
            "num_experts": 6,
            "shared_expert_intermediate_size": 24,
            "sliding_window": 20,
            "num_hidden_layers": 4,
        },
    ),
    "kolibri 1": (
        "Kolibri1",
        {
            **_EXPERTS,
            "num_experts": 6,
            "shared_expert_intermediate_size": 24,
            "norm_topk_prob": True,
            "sliding_window": 20,
            "num_hidden_layers": 2,
            "layer_types": [SLIDING, FULL],
        },
    ),
    "hunyuan v3": ("HYV3", {**_EXPERTS, "num_experts": 6, "num_hidden_layers": 3}),
    "dots 1": (
        "Dots1",
        {
            **_EXPERTS,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "sliding_window": 20,
            "max_window_layers": 1,
        },
    ),
    "solar open": (
        "SolarOpen",
        {
            **_EXPERTS,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "attention_bias": True,
        },
    ),
    "cohere 2 moe, averaged": (
        "Cohere2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "expert_selection_fn": "sigmoid",
            "prefix_dense_intermediate_size": 40,
            "first_k_dense_replace": 1,
            "rms_norm_eps": None,
            "sliding_window": 20,
            "sliding_window_pattern": 2,
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
            "logit_scale": 0.3,
        },
    ),
    "deepseek v2, queries without latents": (
        "DeepseekV2",
        {
            **_LATENT_EXPERTS,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "rope_parameters": _YARN,
        },
    ),
    "deepseek v2, best groups": (
        "DeepseekV2",
        {**_LATENT_EXPERTS, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek v3": (
        "DeepseekV3",
        {
            **_LATENT_EXPERTS,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "rope_parameters": _YARN,
        },
    ),
    "deepseek v3.2": (
        "DeepseekV32",
        {
            **_LATENT_EXPERTS,
            **_CHOICE,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": _YARN,
        },
    ),
    "a.x-k1": (
        "AXK1",
        {**_LATENT_EXPERTS, "n_group": 4, "topk_group": 2, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "k-exaone": (
        "ExaoneMoe",
        {**_EXPERTS, "num_experts": 8, "sliding_window": 20, "sliding_window_pattern": 2, "num_hidden_layers": 3},
    ),
    "flexolmo": ("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 3, "head_dim": 8}),
    "kimi k2.5 with vision": (
        "Kimi_K25",
        {**_LATENT_EXPERTS, "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "glm 4.7 flash": ("Glm4MoeLite", _LATENT_EXPERTS),
    "glm 5, shared choices": (
        "GlmMoeDsa",
        {
            **_LATENT_EXPERTS,
            **_CHOICE,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "indexer_types": ["full", "shared", "full"],
        },
    ),
    "kimi linear": (
        "KimiLinear",
        {
            **_EXPERTS,
            **LATENTS,
            "q_lora_rank": None,
            "num_local_experts": 8,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "num_hidden_layers": 4,
            "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
            "linear_num_heads": 4,
            "linear_head_dim": 8,
        },
    ),
    "mistral 4": (
        "Mistral4",
        {
            **_LATENT_EXPERTS,
            "head_dim": 24,
            "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 2 / 3},
        },
    ),
    "longcat-flash": (
        "LongcatFlash",
        {
            **LATENTS,
            "q_lora_rank": 16,
            "num_layers": 2,
            "num_hidden_layers": 4,  # as newer versions of transformers count
            "n_routed_experts": 8,
            "zero_expert_num": 5,
            "moe_topk": 4,
            "expert_ffn_hidden_size": 32,
            "ffn_hidden_size": 48,
            "routed_scaling_factor": 3.0,
        },
    ),
    "cohere 2 moe, softmax": ("Cohere2Moe", {"num_experts": 6, "num_experts_per_tok": 3, "logit_scale": 1.0}),
}
