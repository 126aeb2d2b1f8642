"""Small random checkpoints for tests, written as Hugging Face's own tools write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def tiny_qwen3_config(**overrides: Any) -> dict[str, Any]:
    """Arguments of a transformers Qwen3Config; two layers, about 60,000 parameters."""
    return {
        "vocab_size": 97,  # odd, so that tensor parallelism has to pad it
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        **overrides,
    }


def write_tiny_qwen3(
    path: Path, *, seed: int = 0, dtype: str = "float32", max_shard_size: str = "1GB", **overrides: Any
) -> Path:
    """A random Qwen3 checkpoint, `save_pretrained` into `path`. `overrides`: Qwen3Config's arguments.

    The weights are large enough for the logits to differ clearly, and no norm weight or bias is trivial.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    generator = torch.Generator().manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**tiny_qwen3_config(**overrides)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.2
            parameter.copy_(noise * scale + (1.0 if "norm" in name else 0.0))
        model.model.embed_tokens.weight.mul_(3.0)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    return path


def reference_logits(path: Path, ids: list[int]) -> Any:
    """[len(ids), vocab_size] float32: transformers' logits at every position."""
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]
