"""Tiny models of every family beside Llama, Mistral and Qwen: transformers' names, and arguments of a configuration."""

from __future__ import annotations

from typing import Any

from expert_shapes import EXPERT_SHAPES, LATENTS

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
HALF = {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 9.0],
}
BY_LAYER_TYPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
    FULL: {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
}
FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": [SLIDING, SLIDING, FULL, SLIDING]}
LONGEST_SHORT_RUN = 70
"""With longrope, longer runs take the long factors."""

HYBRID = {
    "rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.25},
    "num_hidden_layers": 5,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
HYBRID_EXPERTS = {
    **HYBRID,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

MAMBA = {
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "num_hidden_layers": 4,
}

ZAMBA2 = {
    "head_dim": None,
    "num_key_value_heads": None,
    "num_hidden_layers": 4,
    "layers_block_type": ["hybrid", LINEAR, "hybrid", "hybrid"],
    "num_mem_blocks": 2,
    "use_shared_attention_adapter": True,
    "adapter_rank": 4,
    "use_mem_rope": True,
    "mamba_expand": 2,
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "mamba_d_state": 16,
    "add_bias_linear": True,
    "tie_word_embeddings": True,
    "time_step_min": 1e-9,  # as Nemotron's
}

JAMBA = {
    "num_hidden_layers": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_d_state": 16,
    "mamba_proj_bias": True,
}

NEMOTRON = {
    "layers_block_type": [LINEAR, "moe", FULL, "mlp", LINEAR, FULL],
    "num_hidden_layers": 6,
    "ssm_state_size": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
    "time_step_min": 1e-9,  # the limit holds for prompts alone in transformers, and in no other implementation
}
LFM3 = {
    "hidden_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["conv", FULL, SLIDING, FULL],
    "sliding_window": 20,
    "rope_parameters": None,
    "conv_bias": True,
    "tie_word_embeddings": True,
}
QWEN2_5_VL = {"rope_parameters": {**DEFAULT, "mrope_section": [1, 1, 2]}, "bos_token_id": 0, "head_dim": None}
QWEN3_VL = {
    "rope_parameters": {**DEFAULT, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    "num_hidden_layers": 3,
}
OLDER = {"hidden_size": 64, "num_key_value_heads": None, "head_dim": None}
LAYER_INPUTS = {
    "sliding_window": 20,
    "rope_parameters": None,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3, layers without rope": ("SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "smollm3, windows where nothing rotates": (
        "SmolLM3",
        {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 20},
    ),
    "llama, dynamic rope": ("Llama", {"rope_parameters": {**DEFAULT, "rope_type": "dynamic", "factor": 6.0}}),
    "llama 3.2 with vision, read as text": (
        "MllamaText",
        {"num_hidden_layers": 5, "cross_attention_layers": [1, 3], "head_dim": None},
    ),
    "helium": ("Helium", {"hidden_size": 64}),
    "cwm": ("Cwm", {"sliding_window": 20, "num_hidden_layers": 5, "rope_parameters": None}),
    "ministral, windows by layer": ("Ministral", {"sliding_window": 20, **FOUR_LAYERS}),
    "ministral 3, queries that grow": (
        "Ministral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "mistral 3 with vision": (
        "Mistral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}, "tie_word_embeddings": False},
    ),
    "gemma": ("Gemma", {"hidden_act": "gelu_pytorch_tanh"}),
    "gemma 2": ("Gemma2", {"sliding_window": 20, "num_hidden_layers": 3, "attn_logit_softcapping": 2.0}),
    "vaultgemma": ("VaultGemma", {"sliding_window": 20, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 24}),
    "gemma 3": (
        "Gemma3Text",
        {"sliding_window": 20, "rope_parameters": BY_LAYER_TYPE, "query_pre_attn_scalar": 24, **FOUR_LAYERS},
    ),
    "gemma 3 with vision": (
        "Gemma3",
        {"sliding_window": 20, "rope_parameters": BY_LAYER_TYPE, "tie_word_embeddings": True, **FOUR_LAYERS},
    ),
    "gemma 3n, shared keys": (
        "Gemma3nText",
        {
            "sliding_window": 20,
            "rope_parameters": BY_LAYER_TYPE,
            "num_hidden_layers": 5,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
            "num_kv_shared_layers": 2,
            "intermediate_size": [48, 48, 48, 64, 64],
            "activation_sparsity_pattern": [0.7, 0.7, 0.0, 0.0, 0.0],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 90,
            "laurel_rank": 8,
            "altup_num_inputs": 3,
        },
    ),
    "recurrentgemma": (
        "RecurrentGemma",
        {
            "sliding_window": 20,
            "num_hidden_layers": 5,
            "num_key_value_heads": 1,
            "head_dim": None,
            "tie_word_embeddings": True,
        },
    ),
    "paligemma": ("PaliGemma", {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}),
    "paligemma 2": (
        "PaliGemma 2",
        {"num_hidden_layers": 3, "attn_logit_softcapping": 2.0, "sliding_window": 300, "tie_word_embeddings": True},
    ),
    "qwen 2-vl": ("Qwen2VL", QWEN2_5_VL),
    "exaone 4.5": ("Exaone4_5_", {"sliding_window": 20, **FOUR_LAYERS}),
    "qianfan-ocr": ("QianfanOCR", {}),
    "qwen 2.5-vl": ("Qwen2_5_VL", QWEN2_5_VL),
    "qwen 3-vl": ("Qwen3VL", QWEN3_VL),
    "qwen 2.5-omni": ("Qwen2_5OmniThinker", QWEN2_5_VL),
    "glm 4.6v-flash": ("Glm4v", {"rope_parameters": {**DEFAULT, "mrope_section": [1, 1, 2]}, "head_dim": 8}),
    "glm-ocr": ("GlmOcr", {"rope_parameters": {**DEFAULT, "mrope_section": [2, 1, 1]}, "head_dim": 8}),
    "internvl": ("InternVL", {"head_dim": 8}),
    "paddleocr-vl": ("PaddleOCRVL", {"rope_parameters": {**DEFAULT, "mrope_section": [4, 2, 2]}}),
    "lighton-ocr": ("LightOnOcr", {}),
    "pixtral 12b": ("Llava Pixtral", {"head_dim": 8}),
    "llava with siglip": ("Llava Siglip", {"head_dim": 8}),
    "llava-next": ("LlavaNext", {"head_dim": 8}),
    "ovis 2": ("Ovis2", {"head_dim": 8, "tie_word_embeddings": True}),
    "got-ocr 2": ("GotOcr2", {"head_dim": 8, "tie_word_embeddings": True}),
    "videollama 3": ("VideoLlama3", {"head_dim": 8, "tie_word_embeddings": True}),
    "llava-onevision": ("LlavaOnevision", {"head_dim": 8, "tie_word_embeddings": True}),
    "llava 1.5": ("Llava", {"head_dim": 8}),
    "idefics 2": ("Idefics2", {"sliding_window": 20, "seed": 2}),
    "idefics 3": ("Idefics3", {"head_dim": 8}),
    "muse glimmer with vision": (
        "MuseGlimmer",
        {"sliding_window": 20, "num_hidden_layers": 3, "final_logit_softcapping": 5.0, "output_multiplier": 0.5},
    ),
    "muse spark with vision": (
        "MuseSpark",
        {
            "sliding_window": 20,
            "num_hidden_layers": 3,
            "final_logit_softcapping": 5.0,
            "output_multiplier": 0.5,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_hidden_size": 16,
            "routed_scaling_factor": 1.5,
        },
    ),
    "gemma 4, keys as values": (
        "Gemma4Text",
        {
            "sliding_window": 20,
            "rope_parameters": None,
            "attention_k_eq_v": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
            **FOUR_LAYERS,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        },
    ),
    "gemma 4, inputs of each layer and shared keys": ("Gemma4Text", LAYER_INPUTS),
    "gemma 4 with vision, layer inputs and shared keys": ("Gemma4", LAYER_INPUTS),
    "gemma 4 12b": (
        "Gemma4Unified",
        {
            "sliding_window": 16,
            "rope_parameters": None,
            "global_head_dim": 32,
            "tie_word_embeddings": True,
            **FOUR_LAYERS,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        },
    ),
    "phi 3": ("Phi3", {"sliding_window": 20, "rope_parameters": HALF}),
    "phi 4, longrope of short runs": (
        "Phi3",
        {
            "rope_parameters": LONG,
            "original_max_position_embeddings": LONGEST_SHORT_RUN,
            "hidden_size": 64,
            "head_dim": 16,
        },
    ),
    "olmo, clamped": ("Olmo", {"clip_qkv": 0.7, "head_dim": 8}),
    "olmo 2": ("Olmo2", {"num_hidden_layers": 3}),
    "olmo 3": ("Olmo3", {"sliding_window": 20, **FOUR_LAYERS}),
    "olmo hybrid": (
        "OlmoHybrid",
        {
            **HYBRID,
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},
            "layer_types": [LINEAR, FULL, FULL, LINEAR, FULL],
            "head_dim": 8,
        },
    ),
    "glm": ("Glm", {"rope_parameters": HALF}),
    "glm 4": ("Glm4", {"rope_parameters": HALF}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.5,
            "embedding_scale": 0.4,
        },
    ),
    "granite docling": (
        "GraniteDocling",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 0.5,
            "tie_word_embeddings": True,
            "embedding_scale": 0.4,
        },
    ),
    "granite 4 vision": (
        "Granite4Vision",
        {
            "num_hidden_layers": 7,
            "head_dim": 8,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 0.5,
            "tie_word_embeddings": True,
            "embedding_scale": 0.2,
            "seed": 1,
        },
    ),
    "granite swa": (
        "GraniteSWA",
        {"num_hidden_layers": 3, "sliding_window": 20, "mlp_bias": True, "residual_multiplier": 0.5, "head_dim": 8},
    ),
    "hyperclova x": (
        "HyperCLOVAX",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 0.4,
        },
    ),
    "hyperclova x with vision": (
        "HyperCLOVAXVisionV2",
        {"logits_scaling": 0.4, "attention_multiplier": 0.1, "head_dim": 8, "tie_word_embeddings": True},
    ),
    "granite 4": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["full_attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
            "tie_word_embeddings": True,
        },
    ),
    "granite 4, mamba and experts": (
        "GraniteMoeHybrid",
        {
            **MAMBA,
            "mamba_n_groups": 1,
            "layer_types": [LINEAR, FULL, LINEAR, FULL],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "shared_intermediate_size": 40,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
        },
    ),
    "nemotron-h": ("NemotronH", NEMOTRON),
    "nemotron 3 omni": ("NemotronH_Omni_Reasoning_V3", {**NEMOTRON, "num_nextn_predict_layers": 1}),
    "nemotron 3 super": ("NemotronH", {**NEMOTRON, "moe_latent_size": 32}),
    "falcon-h1": (
        "FalconH1",
        {
            **MAMBA,
            "num_hidden_layers": 3,
            "mamba_d_ssm": 48,
            "mamba_n_heads": 6,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.5,
            "mlp_multipliers": [0.8, 1.3],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.7,
            "ssm_in_multiplier": 1.1,
            "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7],
            "ssm_out_multiplier": 1.4,
        },
    ),
    "falcon-h1 without norms": (
        "FalconH1",
        {**MAMBA, "mamba_d_ssm": 64, "num_hidden_layers": 2, "tie_word_embeddings": True},
    ),
    "lfm2": (
        "Lfm2",
        {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "layer_types": ["conv", FULL, "conv", FULL],
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.5,
            "conv_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2-vl": (
        "Lfm2Vl",
        {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "layer_types": ["conv", FULL, "conv", FULL],
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.5,
            "conv_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2 moe": (
        "Lfm2Moe",
        {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "layer_types": ["conv", FULL, "conv", FULL],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": True,
        },
    ),
    "lfm3": ("Lfm3", LFM3),
    "lfm3-vl": ("Lfm3Vl", LFM3),
    "mamba 2": (
        "Mamba2",
        {
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "state_size": 16,
            "num_hidden_layers": 3,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "mamba": ("Mamba", {"state_size": 8, "num_hidden_layers": 3, "tie_word_embeddings": True}),
    "falcon mamba": ("FalconMamba", {"state_size": 16, "num_hidden_layers": 3, "use_bias": True}),
    "jamba": ("Jamba", JAMBA),
    "bamba": ("Bamba", {**MAMBA, "attn_layer_indices": [1, 3], "mamba_proj_bias": True}),
    "zamba 2, shared blocks": ("Zamba2", ZAMBA2),
    "zamba 2, shared blocks without rope": (
        "Zamba2",
        {**ZAMBA2, "use_mem_rope": False, "use_shared_attention_adapter": False, "num_key_value_heads": 2},
    ),
    "bitnet": ("BitNet", {"hidden_size": 64, "attention_bias": True}),
    "dory, loops": (
        "Dory",
        {
            "num_hidden_layers": 4,
            "n_input_layers": 1,
            "n_output_layers": 1,
            "n_recurrent_loops": 2,
            "initializer_range": 0.1,  # about as large as the numbers that it divides
            "sliding_window": 20,
            "rope_parameters": None,
        },
    ),
    "seed-oss": ("SeedOss", {"attention_out_bias": True, "mlp_bias": True}),
    "cohere 2": (
        "Cohere2",
        {
            "sliding_window": 20,
            "hidden_size": 64,
            "tie_word_embeddings": True,
            "logit_scale": 0.3,
            **FOUR_LAYERS,
        },
    ),
    "cohere compass": (
        "CohereCompassText",
        {
            "sliding_window": 20,
            "hidden_size": 64,
            "rope_parameters": {SLIDING: DEFAULT, FULL: None},
            "attention_bias": True,
            "logit_scale": 0.3,
            **FOUR_LAYERS,
        },
    ),
    "cohere compass with vision": (
        "CohereCompass",
        {
            "sliding_window": 20,
            "rope_parameters": {SLIDING: {**DEFAULT, "mrope_section": [4, 2, 2]}, FULL: None},
            "logit_scale": 0.3,
            "tie_word_embeddings": True,
            **FOUR_LAYERS,
        },
    ),
    "command r+": ("Cohere", {"use_qk_norm": True, "tie_word_embeddings": True, "logit_scale": 0.3}),
    "aya vision": (
        "AyaVision",
        {
            "sliding_window": 20,
            "hidden_size": 64,
            "tie_word_embeddings": True,
            "logit_scale": 0.3,
            **FOUR_LAYERS,
        },
    ),
    "command a vision": (
        "Cohere2Vision",
        {
            "sliding_window": 20,
            "hidden_size": 64,
            "tie_word_embeddings": True,
            "logit_scale": 0.3,
            **FOUR_LAYERS,
        },
    ),
    "ernie 4.5": ("Ernie4_5", {"use_bias": True}),
    "hunyuan v1": (
        "HunYuanDenseV1",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0},
            "attention_bias": True,
        },
    ),
    "hunyuan-ocr": (
        "HunYuanVL",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "factor": 1.0,
                "alpha": 50.0,
                "mrope_section": [2, 2, 2, 2],
            },
            "tie_word_embeddings": True,
        },
    ),
    "arcee": ("Arcee", {"mlp_bias": True}),
    "jais 2": ("Jais2", {"hidden_act": "relu2"}),
    "nanochat": ("NanoChat", {"hidden_act": "relu2"}),
    "apertus": ("Apertus", {"hidden_act": "xielu"}),
    "apertus 1.5": ("Apertus1p5Text", {"hidden_act": "xielu", "vocab_size": 120, "output_vocab_size": 97}),
    "nemotron": ("Nemotron", {"hidden_act": "relu2", "rope_parameters": HALF}),
    "starcoder 2": ("Starcoder2", {"sliding_window": 20, "head_dim": 8}),
    "stablelm": ("StableLm", {"hidden_size": 64, "rope_parameters": HALF, "use_qkv_bias": True}),
    "stablelm, parallel": (
        "StableLm",
        {"hidden_size": 64, "rope_parameters": HALF, "use_parallel_residual": True},
    ),
    "pythia": ("GPTNeoX", {**OLDER, "hidden_act": "gelu", "rope_parameters": HALF}),
    "gpt-neox, sequential": (
        "GPTNeoX",
        {**OLDER, "hidden_act": "gelu", "rope_parameters": HALF, "use_parallel_residual": False},
    ),
    "persimmon": ("Persimmon", {**OLDER, "rope_parameters": HALF}),
    "gpt 2": ("GPT2", {**OLDER, "n_inner": 48, "tie_word_embeddings": True}),
    "starcoder": ("GPTBigCode", {**OLDER, "n_inner": 48, "tie_word_embeddings": True}),
    "starcoder, many kv heads": ("GPTBigCode", {**OLDER, "n_inner": 48, "multi_query": False}),
    "gpt-neo": (
        "GPTNeo",
        {**OLDER, "attention_types": [[["global", "local"], 1]], "window_size": 20, "tie_word_embeddings": True},
    ),
    "gpt-j": ("GPTJ", {**OLDER, "n_inner": 48, "rotary_dim": 4}),
    "codegen": ("CodeGen", {**OLDER, "n_inner": 48, "rotary_dim": 4, "n_ctx": 512}),
    "bloom": ("Bloom", {**OLDER, "hidden_size": 48, "num_attention_heads": 6, "tie_word_embeddings": True}),
    "mpt": (
        "Mpt",
        {**OLDER, "attn_config": {"clip_qkv": 0.9}, "tie_word_embeddings": True},
    ),
    "biogpt": ("BioGpt", {**OLDER, "tie_word_embeddings": True}),
    "xglm": ("XGLM", {**OLDER, "ffn_dim": 48, "tie_word_embeddings": True}),
    "opt": ("OPT", {**OLDER, "ffn_dim": 48, "tie_word_embeddings": True}),
    "falcon 7b": ("Falcon", {**OLDER, "ffn_hidden_size": 48, "rope_parameters": DEFAULT, "num_kv_heads": 4}),
    "falcon 40b": (
        "Falcon",
        {**OLDER, "new_decoder_architecture": True, "ffn_hidden_size": 48, "num_kv_heads": 2, "bias": True},
    ),
    "falcon rw": (
        "Falcon",
        {**OLDER, "alibi": True, "multi_query": False, "parallel_attn": False, "ffn_hidden_size": 48, "bias": True},
    ),
    "modernbert decoder": (
        "ModernBertDecoder",
        {
            **OLDER,
            "rope_parameters": None,
            "num_hidden_layers": 4,
            "local_attention": 40,
            "classifier_bias": True,
            "norm_bias": True,
            "mlp_bias": True,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "phi 2": ("Phi", {"hidden_size": 64, "hidden_act": "gelu_new", "rope_parameters": HALF}),
    "minicpm 3": ("MiniCPM3", {**LATENTS, "v_head_dim": None, "scale_emb": 3.0, "dim_model_base": 24}),
    "youtu-llm": ("Youtu", {**LATENTS, "tie_word_embeddings": True}),
    "exaone 4": ("Exaone4", {"sliding_window": 20, **FOUR_LAYERS}),
    "qwen 3-next": ("Qwen3Next", HYBRID_EXPERTS),
    "lara 4 mini": (
        "LaraMini",
        {**HYBRID_EXPERTS, "rope_parameters": DEFAULT, "layer_types": None, "sliding_window": 20},
    ),
    "qwen 3.5": ("Qwen3_5Text", HYBRID),
    "qwen 3.5 with vision": ("Qwen3_5", HYBRID),
    "minicpm-v 4.6": ("MiniCPMV4_6", {**HYBRID, "tie_word_embeddings": True, "embedding_scale": 1.0}),
    "minicpm-v 4.7": ("MiniCPMV4_7", {**HYBRID, "tie_word_embeddings": True, "embedding_scale": 1.0}),
    "minicpm-ocr": ("MiniCPMOcr", {**HYBRID, "tie_word_embeddings": True}),
    "qwen 3.5 mixture of experts": ("Qwen3_5MoeText", HYBRID_EXPERTS),
    **EXPERT_SHAPES,
}
