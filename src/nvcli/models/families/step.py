"""Step 3.5 and 3.7 (https://huggingface.co/stepfun-ai/Step-3.7-Flash): attention with gated heads, of which layers with
windows have more, and experts chosen by sigmoid scores with a correction, clamped in the last layers. Step 3.7 has a
vision tower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nvcli.core.validation import show
from nvcli.models.families.deepseek_experts import layout_without_predictions, read_limits, with_limits
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import FULL, SLIDING, ModelFile
from nvcli.models.layer_config import DecoderConfig
from nvcli.models.mixers.attention import AttentionConfig, OutputGate
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.mixers.mlp import MLPConfig
from nvcli.models.vision.step import read_step_vision

_STARTS = tuple((f"model.{part}.", f"model.language_model.{part}.") for part in ("embed_tokens", "layers", "norm"))
"""Names of the decoder in published files of a model with vision, and in those of transformers."""
_NAMES = (
    (".moe.router_bias", ".mlp.gate.e_score_correction_bias"),
    (".moe.gate.", ".mlp.gate."),
    (".moe.", ".mlp.experts."),
    (".share_expert.", ".mlp.shared_expert."),
)
_COMPUTED: dict[str, str | bool] = {
    "moe_router_activation": "sigmoid",
    "norm_expert_weight": True,
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
}
"""Keys of which one value alone is computed."""
_PADDED = "layer_types", "mlp_layer_types"
"""Lists that may have entries for the layers for multi-token prediction, too."""


def read_step(config: ModelFile) -> DecoderConfig:
    """Read the published file, or one of transformers. Layers for multi-token prediction stay on disk."""
    config.only(**_COMPUTED)
    lists = {key: config.values[key] for key in _PADDED if isinstance(config.values.get(key), list)}
    config = config.replacing(**{key: found[: config.num_layers()] for key, found in lists.items()})
    kinds = config.layer_kinds(lambda _: True)
    attention = {kind: _attention(config, kind, kinds) for kind in dict.fromkeys(kinds)}
    layers = config.layers(kinds, attention, _mlps(config))
    layout = layout_without_predictions(config)
    layout = replace(layout, renamed=(*layout.renamed, *_NAMES), starts=_STARTS if config.section else ())
    return config.decoder(layers, norm=config.rms_norm(weight_offset=1.0), layout=layout)


def _attention(config: ModelFile, kind: str, kinds: list[str]) -> AttentionConfig:
    if not isinstance(config.values.get("rope_parameters"), dict):
        config = _with_rope(config, kind, kinds.index(kind))
    if kind == SLIDING:
        others = config.object("attention_other_setting")
        found = {"num_attention_heads": others.values.get("num_attention_heads")}
        found["num_key_value_heads"] = others.values.get("num_attention_groups")
        config = config.replacing(**{key: value for key, value in found.items() if value is not None})
        config = config.with_names({"num_sliding_attention_heads": "num_attention_heads"})
    scalar = config.positive_number("query_pre_attn_scalar", config.head_dim())
    return config.attention(
        qk_norm="head",
        bias=config.bias(),
        gate=OutputGate(is_of_heads=True),
        scale=scalar**-0.5,
        window=config.window_of(kind, config.positive("max_position_embeddings")),
        rope=config.rope(layer_type=kind),
    )


def _with_rope(config: ModelFile, kind: str, layer: int) -> ModelFile:
    """Return the file with the rotation of a layer of this kind: its entry of lists, and the scaling of full
    attention."""
    values: dict[str, Any] = {} if kind == FULL else {"rope_scaling": None}
    for key, of_lists in {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factors"}.items():
        found = config.values.get(of_lists)
        if isinstance(found, list):
            if layer >= len(found):
                raise config.error(of_lists, f"{show(found)} has no entry for layer {layer}")
            values[key] = found[layer]
    return config.replacing(**values)


def _mlps(config: ModelFile) -> Iterator[MLPConfig | ExpertsConfig]:
    routing = config.sigmoid_routing("moe_router_scaling_factor", keys=("n_routed_experts",))
    shared = config.mlp(size_key="share_expert_dim")
    experts = config.experts(routing, has_correction=True, has_wide_router=True, shared=shared)
    limits, of_shared = (read_limits(config, key) for key in ("swiglu_limits", "swiglu_limits_shared"))
    for mlp, *limits_of_layer in zip(config.mlps(experts, _sparse_layers(config)), limits, of_shared, strict=True):
        yield with_limits(mlp, *limits_of_layer)


def _sparse_layers(config: ModelFile) -> list[bool]:
    """Read which layers have experts: from the list of their numbers, or as other families do."""
    key = "moe_layers_enum"
    found = config.values.get(key)
    if found is None or config.has("mlp_layer_types"):
        return config.sparse_layers(default=3)
    names = found.split(",") if isinstance(found, str) else found
    if not isinstance(names, list) or not all(str(name).strip().isdecimal() for name in names):
        raise config.error(key, f"{show(found)} is not a list of numbers of layers")
    numbers = {int(name) for name in names}
    return [number in numbers for number in range(config.num_layers())]


STEP = Family(
    name="Step 3.5, 3.7",
    architectures=("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
    features="gated heads; windows by layer; a mixture of experts after dense layers; 3.7 with a vision tower, which "
    "sees images as marked tiles",
    examples=("stepfun-ai/Step-3.7-Flash", "stepfun-ai/Step-3.5-Flash"),
    read=read_step,
    read_vision=read_step_vision,
    keys={
        "moe_num_experts": "n_routed_experts",
        "moe_top_k": "num_experts_per_tok",
        "num_attention_groups": "num_key_value_heads",
        "share_expert_dims": "share_expert_dim",
    },
    defaults={"rms_norm_eps": 1e-5},
)
