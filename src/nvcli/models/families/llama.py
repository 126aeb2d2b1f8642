"""Llama 2 and 3 (https://arxiv.org/abs/2407.21783), the models of their architecture (Yi, DeepSeek-LLM, SmolLM2), the
text part of Llama 3.2 with vision, InternLM3, Seed-OSS (https://github.com/ByteDance-Seed/seed-oss), Helium 1
(https://huggingface.co/kyutai/helium-1-preview-2b), CWM (https://arxiv.org/abs/2510.02387), which has windows, and
SmolLM3 (https://huggingface.co/blog/smollm3), in which every fourth layer does not rotate (NoPE)."""

from __future__ import annotations

from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import FULL, SLIDING, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig


def read_llama(config: ModelFile) -> DecoderConfig:
    """Read full attention in every layer, with biases where the file has them."""
    config.layer_types(supported=(FULL,))
    layer = LayerConfig(
        mixer=config.attention(bias=config.bias(), rope=config.rope()),
        mlp=config.mlp(bias=config.mlp_bias()),
    )
    return config.decoder(layer)


def read_mllama(config: ModelFile) -> DecoderConfig:
    """Read the layers that attend to text. Prompts without images skip the others, which are left on disk."""
    key, count = "cross_attention_layers", config.num_layers()
    left = config.values[key] if config.has(key) else [*range(3, min(count, 40), 5)]
    is_list = isinstance(left, list) and all(type(number) is int and 0 <= number < count for number in left)
    kept = [number for number in range(count) if is_list and number not in left]
    if not kept:
        raise config.error(key, f"{show(left)} is not a list of some of {count} layers")
    own = {number: f"layers.{place}." for place, number in enumerate(kept)}
    starts = tuple(
        (f"{start}layers.{number}.", f"{start}{own[number]}" if number in own else _FOR_IMAGES)
        for number in range(count)
        for start in ("model.", "language_model.model.", "model.language_model.")
    )
    layer = LayerConfig(mixer=config.attention(rope=config.rope(500_000.0)), mlp=config.mlp())
    layout = CheckpointLayout(starts=starts, left=(_FOR_IMAGES,), longer=("model.embed_tokens.weight",))
    return config.decoder([layer] * len(kept), layout=layout)


_FOR_IMAGES = "image_layers."
"""The beginning that the names of their tensors get."""


def read_internlm3(config: ModelFile) -> DecoderConfig:
    """Read InternLM3, whose keys for biases have other names."""
    layer = LayerConfig(
        mixer=config.attention(
            qkv_bias=config.get("qkv_bias", bool, False), o_bias=config.get("bias", bool, False), rope=config.rope()
        ),
        mlp=config.mlp(bias=config.get("bias", bool, False)),
    )
    return config.decoder(layer)


def read_seed_oss(config: ModelFile) -> DecoderConfig:
    """Read Seed-OSS, in which each bias has a key of its own."""
    attention = config.attention(
        qkv_bias=config.bias(default=True), o_bias=config.get("attention_out_bias", bool, False), rope=config.rope()
    )
    return config.decoder(LayerConfig(mixer=attention, mlp=config.mlp(bias=config.mlp_bias())))


def read_helium(config: ModelFile) -> DecoderConfig:
    """Read heads that are rotated in neighbouring pairs."""
    attention = config.attention(qkv_bias=config.bias(), rope=config.rope(100_000.0, is_interleaved=True))
    return config.decoder(LayerConfig(mixer=attention, mlp=config.mlp(bias=config.mlp_bias())))


def read_cwm(config: ModelFile) -> DecoderConfig:
    """Read windows; by default the first and then every fourth layer has full attention."""
    attention = config.by_kind(config.attention(rope=config.rope(default_theta=None)), 8192)
    kinds = config.layer_kinds(lambda number: number % 4 == 0)
    return config.decoder(config.layers(kinds, attention, config.mlp(bias=config.mlp_bias())))


LLAMA = Family(
    name="Llama 2, 3",
    architectures=("LlamaForCausalLM", "IQuestCoderForCausalLM"),
    encoders=(
        *("LlamaBidirectionalModel", "LlamaBidirectionalForSequenceClassification"),
        *("EuroBertModel", "EuroBertForMaskedLM"),
    ),
    features="also Yi, DeepSeek-LLM, SmolLM2 and others of this shape; EuroBERT in `embed`",
    examples=("meta-llama/Llama-3.1-8B-Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "01-ai/Yi-1.5-9B-Chat"),
    read=read_llama,
)
MLLAMA = Family(
    name="Llama 3.2 with vision",
    architectures=("MllamaForConditionalGeneration", "MllamaForCausalLM"),
    features="reads text alone: its tower, and the layers that attend to images, are left on disk",
    examples=("meta-llama/Llama-3.2-11B-Vision-Instruct",),
    read=read_mllama,
)
HELIUM = Family(
    name="Helium 1",
    architectures=("HeliumForCausalLM",),
    features="heads rotated in pairs",
    examples=("kyutai/helium-1-preview-2b",),
    read=read_helium,
)
CWM = Family(
    name="CWM",
    architectures=("CwmForCausalLM",),
    features="windows in three of four layers",
    examples=("facebook/cwm",),
    read=read_cwm,
    defaults={
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
    },
)
INTERNLM3 = Family(
    name="InternLM3",
    architectures=("InternLM3ForCausalLM",),
    features="dynamic rope",
    examples=("internlm/internlm3-8b-instruct",),
    read=read_internlm3,
)
SEED_OSS = Family(
    name="Seed-OSS",
    architectures=("SeedOssForCausalLM",),
    features="biased queries, keys and values",
    examples=("ByteDance-Seed/Seed-OSS-36B-Instruct",),
    read=read_seed_oss,
)
LLAMA_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-6,
}
"""Keys that files of models with a vision tower leave out."""


_NOPE_INTERVAL = 4


def read_smollm3(config: ModelFile) -> DecoderConfig:
    """Read which layers rotate, and which have a window: by default, if there are windows, the layers that do not
    rotate have one."""
    attention = config.attention(bias=config.bias(), rope=config.rope(2_000_000.0))
    mlp = config.mlp(bias=config.mlp_bias())
    window = config.window() if config.get("use_sliding_window", bool, False) else None
    rotates = rotating_layers(config)
    types = config.layer_kinds(lambda number: rotates[number])
    layers = (
        LayerConfig(
            mixer=replace(
                attention,
                rope=attention.rope if has_rope else None,
                window=config.bounded(window) if kind == SLIDING else None,
            ),
            mlp=mlp,
        )
        for has_rope, kind in zip(rotates, types, strict=True)
    )
    return config.decoder(layers)


def rotating_layers(config: ModelFile) -> list[bool]:
    """Read `no_rope_layers`, which, despite its name, marks the layers that rotate with 1."""
    key = "no_rope_layers"
    found = config.of_layers(key, (0, 1), may_be_longer=True) if config.values.get(key) else None
    if found is None:
        interval = config.positive("no_rope_layer_interval", _NOPE_INTERVAL)
        found = [(number + 1) % interval != 0 for number in range(config.num_layers())]
    return [bool(one) for one in found]


SMOLLM3 = Family(
    name="SmolLM3",
    architectures=("SmolLM3ForCausalLM",),
    features="layers without rotary positions",
    examples=("HuggingFaceTB/SmolLM3-3B",),
    read=read_smollm3,
    ties_embeddings=True,
)
