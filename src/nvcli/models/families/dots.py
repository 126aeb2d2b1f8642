"""Dots 1 (https://arxiv.org/abs/2506.05767) and Solar Open (https://huggingface.co/upstage/Solar-Open-100B): the
attention of Qwen3 and of Llama with DeepSeek-V3's experts."""

from __future__ import annotations

from nvcli.models.families.deepseek_experts import first_layers_dense, layout_without_predictions, read_experts
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig

_FIRST_WINDOW_LAYER = 62
"""The default of `max_window_layers`."""


def read_dots1(config: ModelFile) -> DecoderConfig:
    """Read normed queries and keys, and windows in the layers that `layer_types` names, or from `max_window_layers`
    on."""
    attention = config.by_kind(config.attention(qk_norm="head", bias=config.bias(), rope=config.rope()), 4096)
    first = config.get("max_window_layers", int, _FIRST_WINDOW_LAYER)
    kinds = config.layer_kinds(lambda number: number < first)
    mlps = first_layers_dense(config, read_experts(config, renormalises=False))
    return config.decoder(config.layers(kinds, attention, mlps), layout=layout_without_predictions(config))


def read_solar_open(config: ModelFile) -> DecoderConfig:
    """Read full attention and experts in all layers."""
    attention = config.attention(qkv_bias=config.bias(), rope=config.rope(1_000_000.0))
    layer = LayerConfig(mixer=attention, mlp=read_experts(config.with_defaults({"n_shared_experts": 1})))
    return config.decoder(layer, layout=layout_without_predictions(config))


DOTS1 = Family(
    name="Dots 1",
    architectures=("Dots1ForCausalLM",),
    features="normed queries and keys; a mixture of experts after dense layers, and experts that all tokens share",
    examples=("rednote-hilab/dots.llm1.inst",),
    read=read_dots1,
)
SOLAR_OPEN = Family(
    name="Solar Open",
    architectures=("SolarOpenForCausalLM",),
    features="a mixture of experts, and an expert that all tokens share",
    examples=("upstage/Solar-Open-100B",),
    read=read_solar_open,
)
