"""Gemma 4 (https://ai.google.dev/gemma/docs/core/model_card_4).

Full-attention layers have a different head size from layers with a window, and may use their keys as values, normed
differently. Scores are not scaled, as queries and keys are normed, and each layer ends by multiplying the residual
stream by a scalar. The layers of 26B-A4B have a mixture of experts beside their MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.gemma import GEMMA3, NORMS_ON_BOTH_SIDES
from nvcli.models.families.model_file import FULL, SLIDING, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerInputsConfig
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.mixers.mlp import MLPConfig
from nvcli.models.rope_config import RopeConfig
from nvcli.models.vision.gemma4 import read_gemma4_unified_vision, read_gemma4_vision

_MOST_KINDS = 8
"""More kinds of layers than any model has; KV groups are chosen by trying sizes for all of them."""

_HAS_EXPERTS = "enable_moe_block"
_LAYOUT = CheckpointLayout(left=("model.audio_tower.", "model.embed_audio."))
_WITH_EXPERTS = replace(
    _LAYOUT,
    renamed=(
        (".mlp.", ".mlp.shared_expert."),
        (".post_feedforward_layernorm_1.", ".mlp.shared_expert_norm."),
        (".router.scale", ".mlp.gate_norm.weight"),
        (".router.proj.", ".mlp.gate."),
        (".router.per_expert_scale", ".mlp.gate.per_expert_scale"),
        (".pre_feedforward_layernorm_2.", ".mlp.experts_input_norm."),
        (".experts.", ".mlp.experts."),
        (".post_feedforward_layernorm_2.", ".mlp.experts_norm."),
    ),
)
"""The MLP is the shared expert, and the routed experts run beside it."""


def read(config: ModelFile) -> DecoderConfig:
    """Read a dense model (31B), one whose layers have inputs of their own and share keys and values (E2B, E4B), or one
    with experts (26B-A4B)."""
    config.only(use_bidirectional_attention="vision")
    layers = tuple(_layers(config))
    if len(set(layers)) > _MOST_KINDS:
        raise config.error("per_layer_config", f"describes more than {_MOST_KINDS} kinds of layers")
    return config.decoder(
        layers,
        embedding_scale=float(config.positive("hidden_size") ** 0.5),
        rounds_embedding_scale=True,
        layer_inputs=read_layer_inputs(config),
        logit_soft_cap=config.optional_number("final_logit_softcapping", None),
        layout=_WITH_EXPERTS if config.get(_HAS_EXPERTS, bool, False) else _LAYOUT,
    )


def _layers(config: ModelFile) -> Iterator[LayerConfig]:
    mlp = config.mlp(key="hidden_activation", default="gelu_pytorch_tanh")
    if mlp.activation.kind != "gelu_tanh":
        raise config.error("hidden_activation", f"{mlp.activation.kind} is not supported; supported: gelu_pytorch_tanh")
    kinds = config.every_nth_full(6)
    kinds[-1] = FULL  # whatever the file says, as in transformers
    owners = kv_owners(config, kinds)
    wide = replace(mlp, intermediate_size=2 * mlp.intermediate_size)
    is_wide = config.get("use_double_wide_mlp", bool, False)
    experts = _experts(config, mlp) if config.get(_HAS_EXPERTS, bool, False) else None
    for number, (kind, owner) in enumerate(zip(kinds, owners, strict=True)):
        attention = _attention(_of_layer(config, number, kind), kind)
        if owner is not None:
            if attention != _attention(_of_layer(config, owner, kind), kind):
                raise config.error("per_layer_config", f"layer {number} shares keys with one whose heads differ")
            attention = replace(attention, reads_kv_of=owner)
        dense = wide if owner is not None and is_wide else mlp
        yield LayerConfig(
            mixer=attention,
            mlp=dense if experts is None else replace(experts, shared=dense),
            norms=NORMS_ON_BOTH_SIDES,
            has_scalar=True,
        )


def kv_owners(config: ModelFile, kinds: Sequence[str]) -> list[int | None]:
    """Return the numbers of the layers whose keys and values layers read: in the last `num_kv_shared_layers` ones that
    of the last layer of their kind before all these; None: their own."""
    num_shared = config.get("num_kv_shared_layers", int, 0)
    own = kinds[: len(kinds) - num_shared]
    if not 0 <= num_shared < len(kinds) or set(own) != set(kinds):
        raise config.error(
            "num_kv_shared_layers", f"{show(num_shared)} of {len(kinds)} layers share keys, so none has its own"
        )
    last = {kind: number for number, kind in enumerate(own)}
    return [None if number < len(own) else last[kind] for number, kind in enumerate(kinds)]


def _experts(config: ModelFile, mlp: MLPConfig) -> ExpertsConfig:
    return config.experts(
        config.routing(keys=("num_experts",), chosen_key="top_k_experts", renormalise=True),
        activation=mlp.activation,
        has_factors=True,
        has_norms=True,
    )


def read_layer_inputs(config: ModelFile, *, may_lack_ids: bool = False) -> LayerInputsConfig | None:
    """Read the inputs of layers. `may_lack_ids`: whether their table may be shorter than the vocabulary."""
    if not config.get("hidden_size_per_layer_input", int, 0):
        return None
    key = "vocab_size_per_layer_input"
    vocab_size = config.positive(key)
    lacks_ids = vocab_size < config.positive("vocab_size")
    if lacks_ids and not may_lack_ids:
        raise config.error(key, f"{vocab_size} is below `vocab_size`: some tokens would have no embedding")
    return LayerInputsConfig(
        vocab_size=vocab_size,
        size=config.positive("hidden_size_per_layer_input"),
        padding_id=config.get("pad_token_id", int, 0),
        lacks_ids=lacks_ids,
    )


def _of_layer(config: ModelFile, number: int, kind: str) -> ModelFile:
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
    return config.with_values(values)


def _attention(config: ModelFile, kind: str) -> AttentionConfig:
    attention = config.attention(
        scale=1.0,
        window=_window(config) if kind == SLIDING else None,
        qk_norm="head",
        norms_values=True,
        keys_are_values=kind == FULL and config.get("attention_k_eq_v", bool, False),
        bias=config.bias(),
        rope=_rope(config, kind),
    )
    rope = attention.rope
    if attention.keys_are_values and rope is not None and rope.row_order(attention.head_dim) is not None:
        # Ranks would keep the values' dimensions in the keys' order, which o_proj does not expect.
        raise config.error("rope_parameters", "a part of each head cannot be rotated where keys are values")
    return attention


def _window(config: ModelFile) -> int | None:
    """Read the window. Where only layers with one attend to images both ways, it stays, however large it is."""
    window = config.window(512)
    return window if config.has("use_bidirectional_attention") else config.bounded(window)


def _rope(config: ModelFile, kind: str) -> RopeConfig:
    """Read the rotation. Layers with a window rotate whole heads; the others, by default, a quarter of their
    frequencies."""
    if config.values.get("rope_parameters") is None:
        if kind == SLIDING:
            return RopeConfig(rope_type="default", theta=10_000.0)
        return RopeConfig(rope_type="proportional", theta=1_000_000.0, partial_rotary_factor=0.25)
    return config.rope(default_theta=None, layer_type=kind)


GEMMA4 = Family(
    name="Gemma 4",
    architectures=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    features="heads of two sizes, keys as values, inputs of each layer, experts beside an MLP; a vision tower",
    examples=("google/gemma-4-31B-it", "google/gemma-4-26B-A4B-it", "google/gemma-4-E4B-it", "google/gemma-4-E2B-it"),
    read=read,
    read_vision=read_gemma4_vision,
    ties_embeddings=True,
    defaults={
        **GEMMA3.defaults,
        "vocab_size": 262_144,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
    },
)
GEMMA4_UNIFIED = Family(
    name="Gemma 4 12B",
    architectures=("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
    features="as Gemma 4, and images without a tower",
    examples=("google/gemma-4-12B-it",),
    read=read,
    read_vision=read_gemma4_unified_vision,
    ties_embeddings=True,
    defaults={
        **GEMMA3.defaults,
        "vocab_size": 262_144,
        "max_position_embeddings": 262_144,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    },
)
