"""GLM-5.3-Flash (https://github.com/zai-org): Kimi Delta Attention between layers of latent attention without rotated
numbers, to keys that are chosen by pools; clamped MLPs and experts, and several residual streams that are mixed with
each other; after a vision tower."""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import SHARED_EXPERT, read_experts, read_limit, with_limits
from nvcli.models.families.family import Family
from nvcli.models.families.kimi_linear import NAMES_OF_DELTA, SECTION, read_delta, read_lowest_decay
from nvcli.models.families.latent_attention import choosing_layers, with_indexers
from nvcli.models.families.model_file import FULL, LINEAR, MAX_HEAD_DIM, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.delta_net import KimiDeltaConfig
from nvcli.models.mixers.latent_attention import IndexerConfig, LatentAttentionConfig
from nvcli.models.vision.glm import read_glm5_vision

_INDEXED = "indexed_attention"
_BOUND = "gate_lower_bound"
_MOST_POOLED = 256
"""The most keys that are chosen together; more than any model has."""
_NAMES = (
    *NAMES_OF_DELTA,
    (".hc_attn_", ".attn_hc."),
    (".hc_ffn_", ".ffn_hc."),
    SHARED_EXPERT,
)


def read(config: ModelFile) -> DecoderConfig:
    """Read the text model. A layer for multi-token prediction stays on disk."""
    norm, chooser = config.rms_norm(), _read_attention(config)
    delta, other = _read_delta(config), replace(chooser, indexer=None)
    mlps, limit = config.mlps(read_experts(config), config.sparse_layers(3)), read_limit(config)
    layers = (
        LayerConfig(
            mixer=delta if kind == LINEAR else chooser if chooses else other,
            mlp=with_limits(mlp, limit, limit, kind="clamped_swiglu"),
        )
        for kind, chooses, mlp in zip(_layer_types(config), choosing_layers(config), mlps, strict=True)
    )
    streams = config.streams(norm, default_iterations=20, ends_with_mean=True)
    layout = CheckpointLayout(renamed=_NAMES, left=(f"model.layers.{config.num_layers()}.",))
    return with_indexers(config.decoder(layers, norm=norm, layout=layout, streams=streams))


def _read_attention(config: ModelFile) -> LatentAttentionConfig:
    """Read latent attention without rotated numbers, to pools of keys and those after the last one."""
    config.only(index_kpool_always_select_tail=True, attention_bias=False)
    if config.get("qk_rope_head_dim", int, 0):
        raise config.error("qk_rope_head_dim", "only 0 is supported here: nothing is rotated")
    plain_dim, most = config.positive("qk_nope_head_dim", most=MAX_HEAD_DIM), config.positive("index_topk", 2048)
    pool = config.positive("index_kpool", 16, least=2, most=_MOST_POOLED)
    if most % pool:
        raise config.error("index_topk", f"{most} keys are no whole number of pools of {pool} (`index_kpool`)")
    return LatentAttentionConfig(
        num_heads=config.positive("num_attention_heads"),
        query_rank=config.positive("q_lora_rank"),
        latent_dim=config.positive("kv_lora_rank", most=MAX_HEAD_DIM),
        plain_dim=plain_dim,
        rope_dim=0,
        value_dim=config.positive("v_head_dim", most=MAX_HEAD_DIM),
        scale=plain_dim**-0.5,
        rope=None,
        norm_eps=config.rms_norm().eps,
        top_k=most + pool - 1,
        indexer=IndexerConfig(
            num_heads=config.positive("index_n_heads", 32),
            head_dim=config.positive("index_head_dim", 128, most=MAX_HEAD_DIM),
            is_interleaved=False,
            pool=pool,
        ),
    )


def _read_delta(config: ModelFile) -> KimiDeltaConfig:
    """Read Kimi Delta Attention, whose decays may be bounded."""
    section = config.object(SECTION)
    source, key = (section, _BOUND) if _BOUND in section.values else (config, "linear_lower_bound")
    is_null = key in source.values and not source.has(key)
    is_bounded = not is_null or (config.has(SECTION) and section.get("safe_gate", bool, True))
    return replace(read_delta(config), lowest_decay=read_lowest_decay(source, key) if is_bounded else None)


def _layer_types(config: ModelFile) -> list[str]:
    """Read `layer_types`; if they are absent, every fourth layer has latent attention."""
    types = config.layer_types(supported=(_INDEXED, FULL, LINEAR))
    return types or [_INDEXED if number % 4 == 3 else LINEAR for number in range(config.num_layers())]


GLM5_NEXT = Family(
    name="GLM-5.3-Flash",
    architectures=("Glm5NextForConditionalGeneration",),
    features="KDA between layers of latent attention to pools of keys that an indexer chooses (DSA); experts; several "
    "residual streams (mHC); with a vision tower",
    examples=("zai-org/GLM-5.3-Flash",),
    read=read,
    read_vision=read_glm5_vision,
    defaults={
        "kv_lora_rank": 512,
        "linear_conv_kernel_dim": 4,
        "linear_head_dim": 128,
        "linear_num_heads": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 256,
        "routed_scaling_factor": 2.5,
        "v_head_dim": 256,
    },
)
