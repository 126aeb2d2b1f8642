"""Random heads for multi-token prediction, written into small checkpoints as published files have them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints import edit_json, edit_weights
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.models.geometry import model_tensors

if TYPE_CHECKING:
    from torch import Tensor

_IN_LAYER = {
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.fc.": "eh_proj.",
    "mtp.norm.": "shared_head.norm.",
    "mtp.layers.0.": "",
    ".shared_expert.": ".shared_experts.",
    ".indexer_wk.": ".indexer.wk.",
}
"""Qwen's names and those of DeepSeek-V3 and GLM-4.5 behind the number of the layer."""
_OF_LONGCAT = {
    "mtp.pre_fc_norm_embedding.": "layers.0.enorm.m.",
    "mtp.pre_fc_norm_hidden.": "layers.0.hnorm.m.",
    "mtp.fc.": "layers.0.eh_proj.",
    "mtp.norm.": "norm.",
    "mtp.layers.0.mlp.": "layers.0.transformer_layer.mlp.",
    "mtp.": "",
}
_OF_LING = {
    **_IN_LAYER,
    "mtp.norm.": "final_layernorm.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.": ".attention.",
    "e_score_correction_bias": "expert_bias",
}
_OF_MIMO = {
    **_IN_LAYER,
    "mtp.norm.": "final_layernorm.",
    "post_attention_layernorm": "pre_mlp_layernorm",
    ".sinks": ".attention_sink_bias",
}


def stored_name(name: str, config: ModelConfig) -> str:
    """Return the name in a family's files of a tensor that Qwen calls `name`."""
    if config.architecture.startswith("Qwen"):
        return name
    prefix, names = f"model.layers.{config.num_layers}.", _IN_LAYER
    if config.architecture.startswith("Longcat"):
        prefix, names = "model.mtp.", _OF_LONGCAT
    elif config.architecture.startswith("MiMo"):
        prefix, names = "model.mtp.layers.0.", _OF_MIMO
    elif config.architecture.startswith("Bailing"):
        names = _OF_LING
    for found, wanted in names.items():
        name = name.replace(found, wanted)
    return prefix + name


def add_mtp_head(path: Path, *, seed: int = 1) -> Path:
    """Add a random head to a checkpoint of one file whose family has heads. `path` is returned."""
    import torch

    edit_json(path / "config.json", num_nextn_predict_layers=1)  # Qwen's files lack it
    config = load_model_config(path)
    generator = torch.Generator().manual_seed(seed)
    head = [tensor for tensor in model_tensors(config.with_mtp(), "float32") if tensor.part == "draft head"]

    def add(weights: dict[str, Tensor]) -> None:
        for tensor in head:
            for name in tensor.stored_names:
                noise = torch.randn(tensor.stored_shape, generator=generator)
                scale = noise.shape[-1] ** -0.5 if noise.dim() == 2 else 0.2
                is_norm = "norm" in name and tensor.offset == 0
                weights[stored_name(name, config)] = noise * scale + (1.0 if is_norm else 0.0)

    edit_weights(path, add)
    return path
