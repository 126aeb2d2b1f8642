"""BitNet (https://arxiv.org/abs/2504.12285): Llama's layers with squared relu, and norms of what the projections of the
results of attention and MLP read. The format of its weights is `quantisation/bitnet.py`."""

from __future__ import annotations

from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig


def read(config: ModelFile) -> DecoderConfig:
    """Read BitNet."""
    attention = config.attention(rope=config.rope(500_000.0), bias=config.bias(), norms_row=True)
    mlp = config.mlp(default="relu2", norms_hidden=True)
    return config.decoder(LayerConfig(mixer=attention, mlp=mlp))


BITNET = Family(
    name="BitNet",
    architectures=("BitNetForCausalLM",),
    features="norms inside of attention and MLP, squared relu; ternary weights, activations of 8 bits",
    examples=("microsoft/bitnet-b1.58-2B-4T", "microsoft/bitnet-b1.58-2B-4T-bf16"),
    read=read,
)
