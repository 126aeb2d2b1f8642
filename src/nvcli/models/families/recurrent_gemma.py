"""RecurrentGemma (https://arxiv.org/abs/2404.07839): Griffin's recurrent units in two of three layers, and attention
with a window in the others."""

from __future__ import annotations

import math

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.mixer import Mixer
from nvcli.models.mixers.rg_lru import RgLruConfig

_BLOCK = ".temporal_block."
_LAYOUT = CheckpointLayout(
    renamed=(
        *((f"{_BLOCK}{name}_proj.", f".self_attn.{name}_proj.") for name in "qkvo"),
        *((f"{_BLOCK}linear_{name}.", f".recurrent.{name}_proj.") for name in ("y", "x", "out")),
        (f"{_BLOCK}conv_1d.", ".recurrent.conv1d."),
        (f"{_BLOCK}rg_lru.", ".recurrent."),
        (".mlp_block.", ".mlp."),
        (".temporal_pre_norm.", ".input_layernorm."),
        (".channel_pre_norm.", ".post_attention_layernorm."),
        ("model.final_norm.", "model.norm."),
    )
)
_KINDS = "block_types"


def read(config: ModelFile) -> DecoderConfig:
    """Read recurrent layers and layers with a window, in a pattern that repeats. Weights of norms are stored as
    differences from 1, and the MLP's size counts gate and up."""
    attention = config.attention(
        qkv_bias=config.bias(),
        o_bias=True,
        window=config.bounded(config.window(2048)),
        rope=config.rope(default_partial=0.5),
    )
    hidden_size = config.positive("hidden_size")
    width = config.positive("lru_width", hidden_size)
    if width % attention.num_heads:
        raise config.error("lru_width", f"{attention.num_heads} heads do not divide {width}")
    recurrent = RgLruConfig(
        num_heads=attention.num_heads,
        head_dim=width // attention.num_heads,
        conv_taps=config.conv_taps("conv1d_width"),
    )
    mixers: dict[str, Mixer] = {"recurrent": recurrent, "attention": attention}
    pattern = config.values[_KINDS] if config.has(_KINDS) else ["recurrent", "recurrent", "attention"]
    if not isinstance(pattern, list) or not pattern or any(kind not in [*mixers] for kind in pattern):
        raise config.error(_KINDS, f"{show(pattern)} is not a list of recurrent and attention")
    size = config.positive("intermediate_size", least=2) // 2
    mlp = config.replacing(intermediate_size=size).mlp(key="hidden_activation", default="gelu_pytorch_tanh", bias=True)
    layers = (
        LayerConfig(mixer=mixers[pattern[number % len(pattern)]], mlp=mlp) for number in range(config.num_layers())
    )
    return config.decoder(
        layers,
        norm=config.rms_norm(weight_offset=1.0),
        embedding_scale=_in_bfloat16(hidden_size**0.5),
        logit_soft_cap=config.optional_number("logits_soft_cap", 30.0),
        layout=_LAYOUT,
    )


def _in_bfloat16(value: float) -> float:
    """Round a number to bfloat16, which has 8 bits of it."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(fraction * 256), exponent - 8)


RECURRENT_GEMMA = Family(
    name="RecurrentGemma",
    architectures=("RecurrentGemmaForCausalLM",),
    features="linear recurrent units (Griffin) between layers of attention with windows",
    examples=("google/recurrentgemma-9b-it", "google/recurrentgemma-2b-it"),
    read=read,
    ties_embeddings=True,
    keys={"attention_window_size": "sliding_window"},
    defaults={"conv1d_width": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6},
)
