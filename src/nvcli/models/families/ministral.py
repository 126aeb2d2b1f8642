"""Ministral 8B, whose layers have windows by `layer_types`, and Ministral 3, whose queries grow with their position."""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.families import mistral
from nvcli.models.families.family import Family
from nvcli.models.families.reading import (
    FULL,
    SLIDING,
    bounded,
    num_layers,
    read_attention,
    read_decoder,
    read_layer_types,
    read_mlp,
    read_window,
)
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import QueryScaling
from nvcli.models.rope_config import rope_section


def read_ministral(config: JsonFile) -> DecoderConfig:
    """Read windows by layer; without `layer_types`, all layers have one if there is one."""
    window = read_window(config, mistral.DEFAULT_WINDOW)
    kinds = read_layer_types(config) or [FULL if window is None else SLIDING] * num_layers(config)
    attention, mlp = read_attention(config, default_theta=10_000.0), read_mlp(config)
    windows = (bounded(window, config) if kind == SLIDING else None for kind in kinds)
    return read_decoder(config, (LayerConfig(mixer=replace(attention, window=one), mlp=mlp) for one in windows))


def read_ministral3(config: JsonFile) -> DecoderConfig:
    """Read the scaling of queries (`llama_4_scaling_beta`) beside YaRN."""
    rope = rope_section(config)
    scaling = None
    if rope.get("llama_4_scaling_beta", float, 0.0):
        scaling = QueryScaling(
            beta=rope.positive_number("llama_4_scaling_beta"),
            length=rope.positive("original_max_position_embeddings"),
        )
    window = bounded(read_window(config), config)
    layer = LayerConfig(
        mixer=read_attention(config, default_theta=1_000_000.0, window=window, query_scaling=scaling),
        mlp=read_mlp(config),
    )
    return read_decoder(config, [layer] * num_layers(config))


def read_mistral3(config: JsonFile) -> DecoderConfig:
    """Read the text part of Mistral Small 3.1 and later or of Ministral 3, as its `model_type` says."""
    kind = config.get("model_type", str, "mistral")
    if kind not in _TEXT_PARTS:
        raise config.error("model_type", f"{kind} is not supported; supported: {', '.join(_TEXT_PARTS)}")
    return _TEXT_PARTS[kind](config)


_TEXT_PARTS = {"mistral": mistral.read, "ministral": read_ministral, "ministral3": read_ministral3}

MINISTRAL = Family(
    name="Ministral",
    architectures=("MinistralForCausalLM",),
    features="windows by layer",
    examples=("mistralai/Ministral-8B-Instruct-2410",),
    read=read_ministral,
)
MINISTRAL3 = Family(
    name="Ministral 3",
    architectures=("Ministral3ForCausalLM",),
    features="queries that grow with their position",
    examples=("mistralai/Ministral-3-8B-Instruct-2512-BF16",),
    read=read_ministral3,
)
MISTRAL3 = Family(
    name="Mistral Small 3, Ministral 3 with vision",
    architectures=("Mistral3ForConditionalGeneration",),
    features="the text part; vision stays on disk",
    examples=("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistralai/Ministral-3-14B-Instruct-2512-BF16"),
    read=read_mistral3,
    defaults={"sliding_window": None},
)
