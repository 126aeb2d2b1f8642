"""Gemma 4 (https://ai.google.dev/gemma/docs/core/model_card_4), the text part of its dense models.

Layers of full attention have heads of another size than those with a window, and may use their keys as values, normed
in another way. Scores are not scaled, as queries and keys are normed, and each layer ends with a multiplication.
"""

from __future__ import annotations

from collections.abc import Iterator

from nvcli.models.families.family import Family
from nvcli.models.families.gemma import GEMMA3, GEMMA_NORMS
from nvcli.models.families.reading import (
    FULL,
    SLIDING,
    bounded,
    every_nth_full,
    read_attention,
    read_decoder,
    read_head_dim,
    read_mlp,
    read_num_kv_heads,
    read_window,
)
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import AttentionConfig, DecoderConfig, LayerConfig
from nvcli.models.rope_config import RopeConfig, read_rope
from nvcli.validation import show

_UNSUPPORTED = {
    "hidden_size_per_layer_input": "embeddings for each layer",
    "num_kv_shared_layers": "layers that share keys and values",
    "enable_moe_block": "experts",
}
"""Keys of the family's other models, which are 0 or false in those that are served."""


def read(config: JsonFile) -> DecoderConfig:
    """Read a dense model without embeddings for each layer (31B)."""
    for key, feature in _UNSUPPORTED.items():
        if config.values.get(key):
            raise config.error(key, f"{show(config.values[key])}: {feature} are not supported; supported: 0 or false")
    return read_decoder(
        config,
        _layers(config),
        embedding_scale=float(config.positive("hidden_size") ** 0.5),
        rounds_embedding_scale=True,
        logit_soft_cap=config.positive_number("final_logit_softcapping")
        if config.values.get("final_logit_softcapping") is not None
        else None,
    )


def _layers(config: JsonFile) -> Iterator[LayerConfig]:
    mlp = read_mlp(config, key="hidden_activation", default="gelu_pytorch_tanh")
    kinds = every_nth_full(config, 6)
    kinds[-1] = FULL  # whatever the file says, as in transformers
    for number, kind in enumerate(kinds):
        attention = _attention(_of_layer(config, number, kind), kind)
        yield LayerConfig(attention=attention, mlp=mlp, norms=GEMMA_NORMS, has_scalar=True)


def _of_layer(config: JsonFile, number: int, kind: str) -> JsonFile:
    """Return the settings of one layer: those that newer files list by layer, or older files for full attention."""
    values = dict(config.values)
    listed = values.get("per_layer_config")
    if isinstance(listed, dict):
        found = listed.get(str(number), {})
        if not isinstance(found, dict):
            raise config.error(f"per_layer_config.{number}", f"{show(found)} is not an object")
        values.update(found)
    elif kind == FULL:
        values["head_dim"] = 512 if values.get("global_head_dim") is None else values["global_head_dim"]
        if values.get("attention_k_eq_v") and values.get("num_global_key_value_heads") is not None:
            values["num_key_value_heads"] = values["num_global_key_value_heads"]
    return JsonFile(config.path, values, section=config.section)


def _attention(config: JsonFile, kind: str) -> AttentionConfig:
    bias = config.get("attention_bias", bool, False)
    return read_attention(
        config,
        default_theta=None,
        rope=lambda head_dim: _rope(config, kind, head_dim),
        head_dim=read_head_dim(config),
        num_kv_heads=read_num_kv_heads(config),
        scale=1.0,
        window=bounded(read_window(config, 512), config) if kind == SLIDING else None,
        qk_norm="head",
        norms_values=True,
        keys_are_values=kind == FULL and config.get("attention_k_eq_v", bool, False),
        qkv_bias=bias,
        o_bias=bias,
    )


def _rope(config: JsonFile, kind: str, head_dim: int) -> RopeConfig:
    """Layers with a window rotate whole heads, and the others by default a quarter of their frequencies."""
    if config.values.get("rope_parameters") is None:
        if kind == SLIDING:
            return RopeConfig(rope_type="default", theta=10_000.0)
        return RopeConfig(rope_type="proportional", theta=1_000_000.0, partial_rotary_factor=0.25)
    return read_rope(config, head_dim=head_dim, default_theta=None, layer_type=kind)


GEMMA4 = Family(
    name="Gemma 4 dense",
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    features="heads of two sizes, keys as values; the text part of 31B, not of E2B, E4B and 26B-A4B",
    examples=("google/gemma-4-31B-it",),
    read=read,
    ties_embeddings=True,
    defaults={**GEMMA3.defaults, "vocab_size": 262_144, "hidden_size_per_layer_input": 256},
)
