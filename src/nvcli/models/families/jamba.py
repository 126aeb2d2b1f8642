"""Jamba (https://arxiv.org/abs/2403.19887): Mamba-1 in most layers and attention without positions in a few, with
experts after some of them and gated MLPs after the others."""

from __future__ import annotations

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.bamba import NORMS
from nvcli.models.families.family import Family
from nvcli.models.families.mamba1 import NAMES, read_layer
from nvcli.models.families.model_file import MAX_LAYERS, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.mixer import FeedForward

_LAYOUT = CheckpointLayout(
    renamed=(
        (".feed_forward.router.", ".mlp.gate."),
        (".feed_forward.", ".mlp."),
        ("model.final_layernorm.", "model.norm."),
        *NAMES,
    ),
)


def read_jamba(config: ModelFile) -> DecoderConfig:
    """Read Jamba: of every few layers, one has attention, and one has experts if there are several."""
    attention = config.attention(rope=None)
    expanded = config.positive("mamba_expand", 2) * config.positive("hidden_size")
    mamba = read_layer(config, num_channels=expanded, norm_eps=config.positive_number("rms_norm_eps"))
    has_attention, is_sparse = _every(config, "attn_layer", 8, 4), _every(config, "expert_layer", 2, 1)
    mlps: list[FeedForward] = [config.mlp()] * len(is_sparse)
    if config.positive("num_experts", 16) > 1:
        mlps = [*config.mlps(config.experts(config.routing(), size_key="intermediate_size"), is_sparse)]
    mixers = [attention if found else mamba for found in has_attention]
    layers = [LayerConfig(mixer=mixer, mlp=mlp, norms=NORMS) for mixer, mlp in zip(mixers, mlps, strict=True)]
    return config.decoder(layers, layout=_LAYOUT)


def _every(config: ModelFile, name: str, default_period: int, default_offset: int) -> list[bool]:
    """Read which layers are special ones: one of every period, at an offset."""
    period = config.positive(f"{name}_period", default_period, most=MAX_LAYERS)
    key = f"{name}_offset"
    offset = config.get(key, int, default_offset)
    if not 0 <= offset < period:
        raise config.error(key, f"{offset} is not from 0 to {period - 1}, below `{name}_period`")
    return [number % period == offset for number in range(config.num_layers())]


JAMBA = Family(
    name="Jamba",
    architectures=("JambaForCausalLM",),
    features="Mamba-1 layers between layers of attention without positions; a mixture of experts in some layers, or in "
    "none",
    examples=("ai21labs/AI21-Jamba-Reasoning-3B", "ai21labs/AI21-Jamba-Mini-1.7"),
    read=read_jamba,
)
