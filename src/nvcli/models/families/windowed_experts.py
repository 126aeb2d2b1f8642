"""Mixtures of experts with normed queries and keys and with windows in most layers: Mellum 2
(https://huggingface.co/JetBrains/Mellum2-12B-A2.5B-Base), whose kinds of layers rotate differently, and Flint
(https://huggingface.co/RecursiveSI/flint) and Kolibri 1 (https://huggingface.co/Aleph-Alpha/Kolibri-1), where full
attention does not rotate and experts are chosen by sigmoid scores, beside one that all tokens share."""

from __future__ import annotations

from typing import Any

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import SHARED_EXPERT
from nvcli.models.families.family import Family
from nvcli.models.families.glm import NORMS_OF_GLM4
from nvcli.models.families.model_file import FULL, SLIDING, ModelFile
from nvcli.models.families.qwen import layers_without_experts
from nvcli.models.layer_config import DecoderConfig
from nvcli.models.mixers.attention import AttentionConfig

_FLINT_LAYOUT = CheckpointLayout(renamed=((".self_attn.softmax_offset", ".self_attn.sinks"),))
_KOLIBRI_LAYOUT = CheckpointLayout(
    renamed=(
        (".moe.router.expert_bias", ".mlp.gate.e_score_correction_bias"),
        (".post_attn_norm.", ".post_self_attn_layernorm."),
        (".post_ffn_norm.", ".post_mlp_layernorm."),
        SHARED_EXPERT,
    )
)


def read_mellum(config: ModelFile) -> DecoderConfig:
    """Read rotations by kind of layer; by default all layers have full attention and experts. A head for multi-token
    prediction stays on disk."""
    attention = {
        kind: config.attention(
            window=config.window_of(kind, 1024),
            qk_norm="head",
            bias=config.bias(),
            rope=config.rope(default_theta=None, layer_type=kind),
        )
        for kind in (FULL, SLIDING)
    }
    experts = config.experts(config.routing(renormalise=config.get("norm_topk_prob", bool, True)))
    kinds = config.layer_kinds(lambda _: True)
    mlps = [experts if sparse else config.mlp() for sparse in config.sparse_layers(default=0)]
    return config.decoder(config.layers(kinds, attention, mlps), layout=CheckpointLayout(left=("mtp.",)))


def read_flint(config: ModelFile) -> DecoderConfig:
    """Read attention sinks in all layers. By default the first two layers have no experts; those two, every fourth
    layer after them and the last one have full attention."""
    last = config.num_layers() - 1
    attention = _attention(config, bias=config.bias(), has_sinks=True)
    routing = config.routing(scoring="sigmoid", renormalise=config.get("norm_topk_prob", bool, True))
    shared = config.mlp(size_key="shared_expert_intermediate_size")
    experts = config.experts(routing, has_wide_router=True, shared=shared)
    kinds = config.layer_kinds(lambda number: number < 2 or number % 4 == 1 or number == last)
    is_dense = layers_without_experts(config, default=(0, 1))
    mlps = [config.mlp() if dense else experts for dense in is_dense]
    return config.decoder(config.layers(kinds, attention, mlps), layout=_FLINT_LAYOUT)


def read_kolibri(config: ModelFile) -> DecoderConfig:
    """Read norms before and after the blocks, and experts in all layers; every fifth layer has full attention,
    which rotates in models without windows."""
    attention = _attention(config)
    if config.window(513) is None:
        attention[FULL] = attention[SLIDING]
    routing = config.routing(
        scoring="sigmoid", corrects_logits=True, renormalise=config.get("norm_topk_prob", bool, False)
    )
    shared = config.mlp(size_key="shared_expert_intermediate_size")
    experts = config.experts(routing, has_correction=True, shared=shared)
    layers = config.layers(config.every_nth_full(5), attention, experts, NORMS_OF_GLM4)
    return config.decoder(layers, layout=_KOLIBRI_LAYOUT)


def _attention(config: ModelFile, **traits: Any) -> dict[str, AttentionConfig]:
    """Read attention by kind of layer."""
    return config.by_kind(config.attention(qk_norm="head", rope=config.rope(), **traits), 513, full_rotates=False)


MELLUM = Family(
    name="Mellum 2",
    architectures=("MellumForCausalLM",),
    features="normed queries and keys; rotations by kind of layer; a mixture of experts",
    examples=("JetBrains/Mellum2-12B-A2.5B-Base",),
    read=read_mellum,
    defaults={
        "head_dim": 128,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 500_000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
)
FLINT = Family(
    name="Flint",
    architectures=("FlintForCausalLM",),
    features="attention sinks; full attention without rotary positions; a mixture of experts",
    examples=("RecursiveSI/flint",),
    read=read_flint,
    defaults={"head_dim": 128},
)
KOLIBRI = Family(
    name="Kolibri 1",
    architectures=("Kolibri1ForCausalLM",),
    features="full attention without rotary positions in every fifth layer; norms on both sides; a mixture of experts",
    examples=("Aleph-Alpha/Kolibri-1",),
    read=read_kolibri,
    defaults={"head_dim": 128},
)
