"""SmolLM3 (https://huggingface.co/blog/smollm3): Llama's layers, of which every fourth does not rotate (NoPE)."""

from __future__ import annotations

from dataclasses import replace

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
from nvcli.validation import show

_DEFAULT_INTERVAL = 4


def read(config: JsonFile) -> DecoderConfig:
    """Read which layers rotate, and which have a window: by default those that do not rotate, if any has one."""
    bias = config.get("attention_bias", bool, False)
    attention = read_attention(config, default_theta=2_000_000.0, qkv_bias=bias, o_bias=bias)
    mlp = read_mlp(config, bias=config.get("mlp_bias", bool, False))
    window = read_window(config) if config.get("use_sliding_window", bool, False) else None
    rotates = _rotating_layers(config)
    types = read_layer_types(config) or [FULL if has_rope else SLIDING for has_rope in rotates]
    layers = (
        LayerConfig(
            mixer=replace(
                attention,
                rope=attention.rope if has_rope else None,
                window=bounded(window, config) if kind == SLIDING else None,
            ),
            mlp=mlp,
        )
        for has_rope, kind in zip(rotates, types, strict=True)
    )
    return read_decoder(config, layers)


def _rotating_layers(config: JsonFile) -> list[bool]:
    """Read `no_rope_layers`, which names the layers that rotate with a 1 in spite of its name."""
    count = num_layers(config)
    found = config.values.get("no_rope_layers")
    if found is None:
        interval = _DEFAULT_INTERVAL
        if config.values.get("no_rope_layer_interval") is not None:
            interval = config.positive("no_rope_layer_interval")
        return [(number + 1) % interval != 0 for number in range(count)]
    if not isinstance(found, list) or len(found) < count or any(one not in (0, 1) for one in found):
        raise config.error("no_rope_layers", f"{show(found)} is not a list of 0 and 1 for each of {count} layers")
    return [bool(one) for one in found[:count]]


SMOLLM3 = Family(
    name="SmolLM3",
    architectures=("SmolLM3ForCausalLM",),
    features="layers without rotary positions",
    examples=("HuggingFaceTB/SmolLM3-3B",),
    read=read,
    ties_embeddings=True,
)
