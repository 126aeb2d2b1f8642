"""MiMo-V2-Flash (https://huggingface.co/XiaomiMiMo/MiMo-V2-Flash): windows with attention sinks in most layers, values
that are smaller than their keys, and experts chosen by sigmoid scores with a correction."""

from __future__ import annotations

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import read_experts
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import FULL, MAX_HEAD_DIM, SLIDING, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mtp_config import NORM, MTPConfig, names_of_layer

_OF_WINDOWS = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim", "rope_theta"),
    "add_attention_sink_bias",
)
"""Keys that layers with windows may have values of their own for, under names that begin with `swa_`."""
_PREDICTIONS = "model.mtp."
_HEAD = f"{_PREDICTIONS}layers.0."
_SINKS = (".self_attn.attention_sink_bias", ".self_attn.sinks")


def read(config: ModelFile) -> DecoderConfig:
    """Read the published file, or one of transformers. The first of the layers for multi-token prediction makes a
    head; the others stay on disk."""
    config.only(scoring_func="sigmoid", topk_method="noaux_tc")
    attention = {FULL: _attention(config, FULL), SLIDING: _attention(_section_of_windows(config), SLIDING)}
    has_window = config.of_layers("hybrid_layer_pattern", (0, 1))
    kinds = config.layer_kinds(
        lambda number: number == 0 or number % 6 == 5 if has_window is None else not has_window[number]
    )
    is_sparse = config.of_layers("moe_layer_freq", (0, 1)) or config.sparse_layers()
    layers = config.layers(kinds, attention, config.mlps(read_experts(config), is_sparse))
    norms = LayerNorms(before_mlp="pre_mlp_layernorm")
    layer = LayerConfig(mixer=attention[SLIDING], mlp=config.mlp(), norms=norms)
    names = (*names_of_layer(layer, _HEAD), (f"{_HEAD}final_layernorm.", f"{NORM}."))
    head = MTPConfig(layer=layer, norm=config.rms_norm(), stored_names=names)
    layout = CheckpointLayout(renamed=(_SINKS,), left=(_PREDICTIONS,))
    return config.decoder(layers, layout=layout, mtp=head)


def _attention(config: ModelFile, kind: str) -> AttentionConfig:
    head_dim = config.head_dim()
    value_dim = config.positive("v_head_dim", 128, most=MAX_HEAD_DIM)
    if value_dim > head_dim:
        raise config.error("v_head_dim", f"{value_dim} is more than `head_dim`, {head_dim}")
    previous = config.positive("sliding_window_size") if config.has("sliding_window_size") else None
    window = config.window(129) if previous is None else previous + 1
    return config.attention(
        qkv_bias=config.bias(),
        o_bias=False,
        value_dim=None if value_dim == head_dim else value_dim,
        value_factor=config.positive_number("attention_value_scale", 1.0),
        window=config.bounded(window) if kind == SLIDING else None,
        has_sinks=config.get("add_attention_sink_bias", bool, kind == SLIDING),
        rope=config.rope(None, layer_type=kind, default_partial=0.334),
    )


def _section_of_windows(config: ModelFile) -> ModelFile:
    own = config.with_defaults({"swa_num_key_value_heads": 2 * config.num_kv_heads()})
    return own.with_names({f"swa_{key}": key for key in _OF_WINDOWS})


MIMO_V2_FLASH = Family(
    name="MiMo-V2-Flash",
    architectures=("MiMoV2FlashForCausalLM",),
    features="attention sinks and windows in most layers; values smaller than keys; a mixture of experts",
    examples=("XiaomiMiMo/MiMo-V2-Flash",),
    read=read,
    keys={"layernorm_epsilon": "rms_norm_eps"},
    defaults={
        "head_dim": 192,
        "swa_rope_theta": 10_000.0,
        "rope_theta": 5_000_000.0,
        "attention_value_scale": 0.707,
    },
)
