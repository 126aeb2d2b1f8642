"""Known shapes of dense models beside Qwen3, as their published config.json files have them."""

from __future__ import annotations

from typing import Any

_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": [128001, 128008, 128009],
}
_GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
_GEMMA3: dict[str, Any] = {
    **_GEMMA,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}


def _shape(
    base: dict[str, Any], hidden: int, layers: int, heads: int, intermediate: int, **keys: Any
) -> dict[str, Any]:
    return {
        **base,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        **keys,
    }


DENSE_SHAPES = {
    "llama-3.1-8b": _shape(_LLAMA3, 4096, 32, 32, 14336),
    "llama-3.1-70b": _shape(_LLAMA3, 8192, 80, 64, 28672),
    "gemma-2-9b": _shape(
        _GEMMA,
        *(3584, 42, 16, 14336),
        architectures=["Gemma2ForCausalLM"],
        model_type="gemma2",
        num_key_value_heads=8,
        head_dim=256,
        query_pre_attn_scalar=256,
        vocab_size=256000,
        sliding_window=4096,
        rope_theta=10000.0,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        max_position_embeddings=8192,
    ),
    "gemma-3-4b": _shape(_GEMMA3, 2560, 34, 8, 10240, num_key_value_heads=4, head_dim=256, query_pre_attn_scalar=256),
    "gemma-3-12b": _shape(_GEMMA3, 3840, 48, 16, 15360, num_key_value_heads=8, head_dim=256, query_pre_attn_scalar=256),
    "gemma-3-27b": _shape(
        _GEMMA3, 5376, 62, 32, 21504, num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=168
    ),
    "phi-4": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "intermediate_size": 17920,
        "vocab_size": 100352,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 250000,
        "rope_scaling": None,
        "max_position_embeddings": 16384,
        "original_max_position_embeddings": 16384,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 100265,
    },
}
