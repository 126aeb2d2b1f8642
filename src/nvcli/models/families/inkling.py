"""Inkling (https://huggingface.co/thinkingmachines/Inkling): tokens add to the scores of near keys what they say
themselves, in place of rotations, and short convolutions run over the tokens of keys, values and results. Its router
weighs the experts that all tokens share together with those that it chooses."""

from __future__ import annotations

from collections.abc import Collection

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import AttentionConfig, QueryScaling, RelativeScores
from nvcli.models.mixers.experts import CORRECTION, WEIGHED, ExpertsConfig
from nvcli.models.mixers.mixer import FeedForward
from nvcli.models.mixers.mlp import MLPConfig
from nvcli.models.mixers.result_convolutions import MLP_FACTOR, ResultConvolutions
from nvcli.models.tensor_spec import PAIRED

_FULL, _WINDOW = "hybrid", "hybrid_sliding"
_CONVOLUTIONS = f".{ResultConvolutions.name}."
_SHARED = f".mlp.{WEIGHED}."
_NAMES = (
    *((f"model.{part}embed_norm.", "model.embedding_norm.") for part in ("embed_tokens.", "")),
    ("model.embed.", "model.embed_tokens."),
    ("model.unembed.", "lm_head."),
    (".attn.", ".self_attn."),
    *((f".{stored}.", f".{name}_proj.") for stored, name in zip(("wq_du", "wk_dv", "wv_dv"), "qkv", strict=True)),
    (".wr_du.", ".r_proj."),
    (".wo_ud.", ".o_proj."),
    *((f".self_attn.{name}_sconv.", f"{_CONVOLUTIONS}{name}_conv.") for name in "kv"),
    (".attn_sconv.", f"{_CONVOLUTIONS}mixer_conv."),
    (".mlp_sconv.", f"{_CONVOLUTIONS}mlp_conv."),
    ("_conv.conv1d.", "_conv."),
    (".attn_norm.", ".input_layernorm."),
    (".mlp_norm.", ".post_attention_layernorm."),
    *((f".mlp.{stored}", f"{_CONVOLUTIONS}{MLP_FACTOR}") for stored in ("global_scale", "gate.global_scale")),
    (".mlp.gate.bias", f".mlp.gate.{CORRECTION}"),
    (".mlp.w13_dn.", f".mlp.{PAIRED}."),
    (".mlp.w2_md.", ".mlp.down_proj."),
    (".mlp.shared_experts.shared_w13_weight", f"{_SHARED}{PAIRED}"),
    (".mlp.shared_experts.shared_w2_weight", f"{_SHARED}down_proj"),
    (".mlp.shared_experts.", _SHARED),
    (".mlp.experts.w13_weight", f".mlp.experts.{PAIRED}"),
    (".mlp.experts.w2_weight", ".mlp.experts.down_proj"),
)
"""Names in published files, whose fused projections have alternating rows, and in those of transformers."""
_OF_WINDOWS = ("num_attention_heads", "num_key_value_heads", "head_dim")
"""Keys of which layers with windows have values of their own, under names that begin with `swa_`."""


def read(config: ModelFile) -> DecoderConfig:
    """Read the text part, from a published file or one of transformers. Layers for multi-token prediction stay on
    disk."""
    config.only(shared_expert_sink=True)
    if config.has("dense_intermediate_size"):  # then experts have the other size
        config = config.with_names(
            {"intermediate_size": "moe_intermediate_size", "dense_intermediate_size": "intermediate_size"}
        )
    attention = {_FULL: _full_attention(config), _WINDOW: _windowed_attention(config)}
    layers = [
        LayerConfig(
            mixer=attention[kind],
            convolutions=ResultConvolutions(
                attention=attention[kind],
                hidden_size=config.positive("hidden_size"),
                conv_taps=config.conv_taps("conv_kernel_size"),
            ),
            mlp=mlp,
        )
        for kind, mlp in zip(_kinds(config), _mlps(config), strict=True)
    ]
    start = "model.language_model." if config.section else "model."
    return config.decoder(
        layers,
        embedding_norm=config.rms_norm(),
        logit_scale=1.0 / config.positive_number("logits_mup_width_multiplier"),
        layout=CheckpointLayout(
            starts=(("model.llm.", start),),
            renamed=_NAMES,
            longer=("model.embed_tokens.weight", "lm_head.weight"),
            left=("model.mtp.",),
        ),
    )


def _full_attention(config: ModelFile) -> AttentionConfig:
    scaling: QueryScaling | None = None
    if config.has("log_scaling_n_floor"):
        beta = config.positive_number("log_scaling_alpha", 0.1)
        scaling = QueryScaling(beta=beta, length=config.positive("log_scaling_n_floor"), offset=1, kind="clamped")
    return _attention(config, config.positive("rel_extent"), query_scaling=scaling)


def _windowed_attention(config: ModelFile) -> AttentionConfig:
    own = config.with_names({f"swa_{key}": key for key in _OF_WINDOWS})
    window = config.positive("sliding_window")
    return _attention(own, window, window=window)


def _attention(
    config: ModelFile, extent: int, *, window: int | None = None, query_scaling: QueryScaling | None = None
) -> AttentionConfig:
    return config.attention(
        rope=None,
        scale=1.0 / config.head_dim(),
        qk_norm="head",
        window=window,
        query_scaling=query_scaling,
        relative=RelativeScores(size=config.positive("d_rel"), extent=extent),
        is_convolved=True,
    )


def _kinds(config: ModelFile) -> list[str]:
    """Read the kinds of layers; by default every sixth layer has full attention."""
    kinds = config.layer_types(supported=(_FULL, _WINDOW))
    if kinds is not None:
        return kinds
    numbers = range(config.num_layers())
    windowed: Collection[int] = [number for number in numbers if (number + 1) % 6]
    found = config.values.get("local_layer_ids")
    if found is not None:
        if not isinstance(found, list) or any(number not in numbers for number in found):
            raise config.error("local_layer_ids", f"{show(found)} is not a list of some of {len(numbers)} layers")
        windowed = frozenset(found)
    return [_WINDOW if number in windowed else _FULL for number in numbers]


def _mlps(config: ModelFile) -> list[FeedForward]:
    size, activation = config.positive("moe_intermediate_size"), config.activation()
    names, num_shared = ("n_routed_experts", "num_local_experts"), config.positive("n_shared_experts")
    routing = config.sigmoid_routing("route_scale", None, keys=names, num_shared=num_shared)
    experts: ExpertsConfig = config.experts(
        routing,
        has_correction=True,
        has_wide_router=True,
        shared=MLPConfig(intermediate_size=size, activation=activation),
    )
    is_sparse = config.with_names({"dense_mlp_idx": "first_k_dense_replace"}).sparse_layers(default=0)
    return [experts if sparse else config.mlp() for sparse in is_sparse]


INKLING = Family(
    name="Inkling",
    architectures=("InklingForConditionalGeneration", "InklingForCausalLM"),
    features="relative scores in place of rotations; short convolutions; a mixture of experts; text alone",
    examples=("thinkingmachines/Inkling",),
    read=read,
    keys={
        "unpadded_vocab_size": "vocab_size",
        "sconv_kernel_size": "conv_kernel_size",
        "sliding_window_size": "sliding_window",
        "model_max_length": "max_position_embeddings",
    },
    defaults={
        "d_rel": 16,
        "rel_extent": 1024,
        "conv_kernel_size": 4,
        "sliding_window": 512,
        "route_scale": 8.0,
        "n_shared_experts": 2,
        "logits_mup_width_multiplier": 24.0,
        "rms_norm_eps": 1e-6,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 16,
        "swa_head_dim": 128,
        "max_position_embeddings": 131072,
    },
)
