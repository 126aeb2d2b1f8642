"""Small random checkpoints for tests, written as Hugging Face's own tools write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""The families that `write_tiny_model` writes, by the names of transformers' classes."""


def tiny_model_config(**overrides: Any) -> dict[str, Any]:
    """Arguments of a transformers configuration; two layers, about 60,000 parameters."""
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


def write_tiny_model(
    path: Path,
    family: str = "Qwen3",
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """A random checkpoint of a family, `save_pretrained` into `path`. `overrides`: its configuration's arguments.

    The weights are large enough for the logits to differ clearly, and no norm weight or bias is trivial.
    """
    import torch
    import transformers

    generator = torch.Generator().manual_seed(seed)
    arguments = tiny_model_config(**overrides)
    if family == "Qwen2" and "head_dim" not in overrides:
        del arguments["head_dim"]  # its files have none
    config = getattr(transformers, f"{family}Config")(**arguments)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.2
            parameter.copy_(noise * scale + (1.0 if "norm" in name else 0.0))
        model.model.embed_tokens.weight.mul_(3.0)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    return path


def set_weights(path: Path, name: str, value: float, row: int | slice = slice(None)) -> None:
    """Overwrite rows of a weight in a checkpoint of one file with one value."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    weights = load_file(file)
    weights[name][row] = value
    save_file(weights, file, metadata={"format": "pt"})


def write_tiny_qwen3(path: Path, **settings: Any) -> Path:
    """A random Qwen3 checkpoint; see `write_tiny_model`."""
    return write_tiny_model(path, "Qwen3", **settings)


def reference_logits(path: Path, ids: list[int]) -> Any:
    """[len(ids), vocab_size] float32: transformers' logits at every position."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]
