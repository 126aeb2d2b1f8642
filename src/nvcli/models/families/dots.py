"""Dots 1 (https://arxiv.org/abs/2506.05767) and Solar Open (https://huggingface.co/upstage/Solar-Open-100B): the
attention of Qwen3 and of Llama with DeepSeek-V3's experts. Dots 3 Note
(https://huggingface.co/dots-studio/dots3-note-prev) has latent attention, in three of four layers with a window and in
the others with a choice of keys."""

from __future__ import annotations

from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.families.deepseek_experts import first_layers_dense, layout_without_predictions, read_experts
from nvcli.models.families.family import Family
from nvcli.models.families.latent_attention import read_chosen_keys, read_latent_attention, with_indexers
from nvcli.models.families.model_file import FULL, SLIDING, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import OutputGate
from nvcli.models.mixers.latent_attention import LatentAttentionConfig
from nvcli.models.mixers.mlp import MLPConfig

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


_PARTS = "vision_encoder", "vision_tower", "audio_encoder", "audio_tower", "audio_adapter"
_TOWERS = TowerNames(prefixes=tuple((f"{part}.", f"{part}.") for part in _PARTS))
"""Parts that read images and audio, in published files and in those of transformers; they stay on disk."""
_INDEXED = "indexed_attention"
_WINDOW_SIZES = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
"""Sizes of layers with windows that files have under names of their own, and their defaults."""
_THETAS = {SLIDING: ("swa_rope_theta", 50_000.0), _INDEXED: ("rope_theta", 8e7), FULL: ("rope_theta", 8e7)}
"""The names and defaults of the bases of rotations in files that list none by the kind of layers."""


def read_dots3_note(config: ModelFile) -> DecoderConfig:
    """Read the text part of Dots 3 Note. Each layer may have sizes of its own, and each kind of layers rotates in its
    own way."""
    config.only(mlp_bias=False)
    count, size = config.positive("n_shared_experts", 1), config.positive("shared_experts_intermediate_size")
    shared = MLPConfig(intermediate_size=count * size, activation=config.activation())
    experts = replace(read_experts(config), shared=shared)
    mlps = config.mlps(experts, _sparse_layers(config))
    mixers = [_note_attention(config, number, kind) for number, kind in enumerate(_note_kinds(config))]
    layout = layout_without_predictions(config)
    left = (*layout.left, f"model.layers.{config.num_layers()}.", "model.mtp.")
    layers = (LayerConfig(mixer=mixer, mlp=mlp) for mixer, mlp in zip(mixers, mlps, strict=True))
    return with_indexers(config.decoder(layers, layout=replace(layout, left=left, tower=_TOWERS)))


def _sparse_layers(config: ModelFile) -> list[bool]:
    """Read which layers have experts: those that `mlp_layer_types` or a list `moe_layer_freq` says, or all but the
    first."""
    key = "moe_layer_freq"
    if config.has("mlp_layer_types") or not isinstance(config.values.get(key), list):
        config.only(**{} if config.has("mlp_layer_types") else {key: 1})
        return config.sparse_layers()
    first, listed = config.get("first_k_dense_replace", int, 1), config.of_layers(key, (0, 1)) or []
    return [number >= first and bool(is_sparse) for number, is_sparse in enumerate(listed)]


def _note_kinds(config: ModelFile) -> list[str]:
    """Read the kinds of layers. Older files call those that choose their keys full ones, unless `use_dsa` is false."""
    kinds = config.layer_types(supported=(FULL, SLIDING, _INDEXED))
    if kinds is not None and config.has("per_layer_config") and not config.has("use_dsa"):
        return kinds
    if kinds is None:
        has_windows = config.get("use_sliding_window", bool, True)
        numbers = range(config.num_layers())
        kinds = [SLIDING if has_windows and number > 1 and number % 4 != 1 else FULL for number in numbers]
    found, wanted = (FULL, _INDEXED) if config.get("use_dsa", bool, True) else (_INDEXED, FULL)
    return [wanted if kind == found else kind for kind in kinds]


def _note_attention(config: ModelFile, number: int, kind: str) -> LatentAttentionConfig:
    window = config.positive("sliding_window", 512) if kind == SLIDING else None
    config = _of_layer(config, number, kind)
    eps, hidden = config.positive_number("rms_norm_eps"), config.positive("hidden_size")
    config.only(num_key_value_heads=config.positive("num_attention_heads"))
    attention = read_latent_attention(config, is_interleaved=True)
    if attention.query_rank is None:
        raise config.error("q_lora_rank", "null is not supported")
    attention = replace(
        attention,
        scale=attention.query_dim**-0.5,
        norm_eps=eps,
        query_factor=(hidden / attention.query_rank) ** 0.5,
        latent_factor=(hidden / attention.latent_dim) ** 0.5,
        norms_rotated=True,
        gate=OutputGate(is_of_heads=True),
        window=window,
    )
    return read_chosen_keys(config, attention, is_interleaved=True) if kind == _INDEXED else attention


def _of_layer(config: ModelFile, number: int, kind: str) -> ModelFile:
    """Return the settings of one layer: its sizes, and the rotation of its kind."""
    found: object = {}
    if config.has("per_layer_config"):
        found = config.object("per_layer_config").values.get(str(number), {})
    elif kind == SLIDING:
        sizes = {key: config.positive(f"swa_{key}", default) for key, default in _WINDOW_SIZES.items()}
        rotated = config.positive("swa_head_dim", 256) - sizes["qk_nope_head_dim"]
        found = {**sizes, "qk_rope_head_dim": config.positive("swa_qk_rope_head_dim", rotated)}
    if not isinstance(found, dict):
        raise config.error(f"per_layer_config.{number}", f"{show(found)} is not an object")
    key, default = _THETAS[kind]
    if config.has("rope_parameters"):
        ropes = config.object("rope_parameters").values
        rope = ropes.get(kind, ropes)
    else:
        config.only(rope_scaling="")
        rope = {"rope_theta": config.positive_number(key, default)}
    if not isinstance(rope, dict):
        raise config.error(f"rope_parameters.{kind}", f"{show(rope)} is not an object")
    # The part of a head that is rotated has a key of its own.
    rope = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    return config.replacing(**found, rope_parameters=rope, rope_theta=None, rope_scaling=None)


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
DOTS3_NOTE = Family(
    name="Dots 3 Note",
    architectures=("Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration"),
    features="latent attention with windows, or a choice of keys (DSA); gates of heads; experts; text alone",
    examples=("dots-studio/dots3-note-prev",),
    read=read_dots3_note,
    keys={
        "sliding_window_size": "sliding_window",
        "moe_shared_expert_intermediate_size": "shared_experts_intermediate_size",
    },
    defaults={"rms_norm_eps": 1e-5, "shared_experts_intermediate_size": 1536},
)
