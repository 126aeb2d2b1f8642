"""MiniMax-M2 (https://github.com/MiniMax-AI/MiniMax-M2): norms over all heads together, half of each head rotated, and
experts chosen by sigmoid scores with a correction."""

from __future__ import annotations

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import CORRECTION_BESIDE_GATE
from nvcli.models.families.family import Family
from nvcli.models.families.mistral import MIXTRAL_NAMES
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig

_LAYOUT = CheckpointLayout(renamed=(*MIXTRAL_NAMES, CORRECTION_BESIDE_GATE))


def read(config: ModelFile) -> DecoderConfig:
    """Read full attention in all layers. The files give the number of dimensions that are rotated, `rotary_dim`."""
    rotated = config.positive("rotary_dim", config.head_dim())
    attention = config.attention(default_theta=5_000_000.0, default_partial=rotated / config.head_dim(), qk_norm="row")
    routing = config.routing(scoring="sigmoid", renormalise=True)
    experts = config.experts(routing, size_key="intermediate_size", has_correction=True)
    return config.decoder(LayerConfig(mixer=attention, mlp=experts), layout=_LAYOUT)


MINIMAX_M2 = Family(
    name="MiniMax-M2",
    architectures=("MiniMaxM2ForCausalLM",),
    features="a mixture of experts; norms over all heads together, part of each head rotated",
    examples=("MiniMaxAI/MiniMax-M2", "MiniMaxAI/MiniMax-M2.1"),
    read=read,
)
