"""Phi-3 (https://arxiv.org/abs/2404.14219) and Phi-4: fused projections, partial rotary positions, longrope."""

from __future__ import annotations

from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig


def read(config: ModelFile) -> DecoderConfig:
    """Read one window for all layers, or none. Runs of up to `original_max_position_embeddings` tokens use longrope's
    short factors, and runs of longer ones (`max_model_len`) use its long factors."""
    layer = LayerConfig(mixer=config.attention(window=config.bounded(config.window())), mlp=config.mlp())
    return config.decoder(layer)


PHI3 = Family(
    name="Phi-3, Phi-4",
    architectures=("Phi3ForCausalLM",),
    features="fused projections, partial rotary positions, longrope by max_model_len",
    examples=("microsoft/phi-4", "microsoft/Phi-4-mini-instruct", "microsoft/Phi-3.5-mini-instruct"),
    read=read,
    defaults={"original_max_position_embeddings": 4096},
)
