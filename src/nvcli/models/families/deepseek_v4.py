"""DeepSeek-V4 (2026): attention to one key of each token in a window and to keys that stand for several tokens each,
several residual streams that are mixed with each other, and clamped experts, which in the first layers follow from the
ids of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import SHARED_EXPERT, read_limit, shared_experts, with_limits
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import MAX_HEAD_DIM, SLIDING, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.shared_key import CompressionConfig, SharedKeyConfig
from nvcli.models.rope_config import RopeConfig, read_rope

_HASHED, _CHOSEN = "hash_moe", "moe"
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_RATES = {0: SLIDING, 4: _SPARSE, 128: _HEAVY}
"""The kinds of layers by the numbers that stand for them in `compress_ratios`."""
_MOST_COMPRESSED = 1024
"""The most tokens that have one key; more than any model has."""
_NAMES = (
    (".attn.", ".self_attn."),
    (".ffn.", ".mlp."),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".hc_attn_", ".attn_hc."),
    (".hc_ffn_", ".ffn_hc."),
    (".hc_head.hc_", ".hc_head."),
    (".attn_sink", ".sinks"),
    (".wq_a.", ".q_a_proj."),
    (".wq_b.", ".q_b_proj."),
    (".wkv.", ".kv_proj."),
    (".wo_a.", ".o_a_proj."),
    (".wo_b.", ".o_b_proj."),
    (".q_norm.", ".q_a_norm."),
    (".self_attn.norm.", ".self_attn.kv_norm."),  # as transformers writes it
    (".gate.bias", ".gate.e_score_correction_bias"),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
    (".indexer.compressor.", ".compressor.indexer."),
    (".self_attn.indexer.", ".self_attn.compressor.indexer."),
    (".indexer.weights_proj.", ".indexer.scorer.weights_proj."),
    (".compressor.wgate.", ".compressor.gate_proj."),
    (".indexer.wgate.", ".indexer.gate_proj."),
    (".compressor.norm.", ".compressor.kv_norm."),
    (".indexer.norm.", ".indexer.kv_norm."),
    (".ape", ".position_bias"),
    SHARED_EXPERT,
)
_STARTS = (
    ("layers.", "model.layers."),
    ("embed.", "model.embed_tokens."),
    ("hc_head_", "model.hc_head."),
    ("norm.", "model.norm."),
    ("head.", "lm_head."),
)


def read(config: ModelFile) -> DecoderConfig:
    """Read the model. A layer for multi-token prediction stays on disk."""
    config.only(attention_bias=False, mlp_bias=False, num_key_value_heads=1, topk_method="noaux_tc")
    config.only(scoring_func="sqrtsoftplus", norm_topk_prob=True, n_shared_experts=1)
    norm, limit, kinds = config.rms_norm(), read_limit(config), _layer_types(config)
    attention = {kind: _read_attention(config, kind) for kind in dict.fromkeys(kinds)}
    routing = config.routing(
        keys=("n_routed_experts", "num_local_experts"),
        scoring="sqrtsoftplus",
        renormalise=True,
        scale=config.positive_number("routed_scaling_factor"),
    )
    shared = shared_experts(config, "n_shared_experts")
    chosen = config.experts(routing, has_correction=True, has_wide_router=True, shared=shared)
    hashed = replace(chosen, has_correction=False, table_size=config.positive("vocab_size"))
    experts = {
        kind: with_limits(one, limit, limit, kind="clamped_swiglu")
        for kind, one in ((_HASHED, hashed), (_CHOSEN, chosen))
    }
    return config.decoder(
        (
            LayerConfig(mixer=attention[kind], mlp=experts[mlp])
            for kind, mlp in zip(kinds, _mlp_types(config), strict=True)
        ),
        norm=norm,
        layout=CheckpointLayout(starts=_STARTS, renamed=_NAMES, left=("mtp.",)),
        streams=config.streams(norm, default_iterations=20),
    )


def _read_attention(config: ModelFile, kind: str) -> SharedKeyConfig:
    """Read the attention of layers of a kind."""
    num_heads, head_dim = config.positive("num_attention_heads"), config.head_dim()
    num_groups = config.positive("o_groups")
    if num_heads % num_groups:
        raise config.error("o_groups", f"{num_groups} groups do not divide {num_heads} attention heads")
    rope_dim = _rope_dim(config, head_dim)
    return SharedKeyConfig(
        num_heads=num_heads,
        head_dim=head_dim,
        query_rank=config.positive("q_lora_rank"),
        num_groups=num_groups,
        group_rank=config.positive("o_lora_rank"),
        window=config.positive("sliding_window"),
        rope=_read_rope(config, head_dim) if kind == SLIDING else _read_other_rope(config, head_dim),
        rope_dim=rope_dim,
        norm_eps=config.rms_norm().eps,
        compression=None if kind == SLIDING else _read_compression(config, kind, head_dim, rope_dim),
    )


def _read_compression(config: ModelFile, kind: str, head_dim: int, rope_dim: int) -> CompressionConfig:
    """Read the compressed keys of layers of a kind."""
    key, default = ("compress_rate_csa", 4) if kind == _SPARSE else ("compress_rate_hca", 128)
    rates = config.object("compress_rates") if config.has("compress_rates") else config
    rate = rates.positive(kind, config.positive(key, default), least=2, most=_MOST_COMPRESSED)
    if kind == _HEAVY:
        return CompressionConfig(rate=rate, num_series=1)
    index_dim = config.positive("index_head_dim", 128, least=rope_dim, most=MAX_HEAD_DIM)
    return CompressionConfig(
        rate=rate,
        num_series=2,
        top_k=config.positive("index_topk", 512),
        num_index_heads=config.positive("index_n_heads", 64),
        index_dim=index_dim,
    )


def _rope_dim(config: ModelFile, head_dim: int) -> int:
    """Read how many of a head's numbers are rotated: `qk_rope_head_dim`, or a part of the head."""
    key = "qk_rope_head_dim"
    partial = config.positive_number("partial_rotary_factor", 64 / 512)
    rope_dim = config.positive(key, int(head_dim * min(partial, 1.0)), most=MAX_HEAD_DIM)
    if rope_dim % 2 or rope_dim > head_dim:
        raise config.error(key, f"{rope_dim} of {head_dim} numbers of a head cannot be rotated in pairs")
    return rope_dim


def _read_rope(config: ModelFile, head_dim: int) -> RopeConfig:
    """Read the rotation of layers without compressed keys, which nothing stretches. `rope_parameters` have those of
    both kinds of layers; where files have one, in `rope_scaling`, it is the other kind's."""
    parameters = config.values.get("rope_parameters")
    if not (isinstance(parameters, dict) and isinstance(parameters.get("main"), dict)):
        config = config.replacing(rope_parameters=None, rope_scaling=None)
    rope = read_rope(config, head_dim=head_dim, default_theta=10_000.0, layer_type="main", is_interleaved=True)
    return replace(rope, partial_rotary_factor=1.0)  # of the numbers that are rotated


def _read_other_rope(config: ModelFile, head_dim: int) -> RopeConfig:
    """Read the rotation of layers with compressed keys, whose angles have a base of their own and may be stretched
    (YaRN), but cosines and sines are not."""
    parameters = config.values.get("rope_parameters")
    if not (isinstance(parameters, dict) and isinstance(parameters.get("compress"), dict)):
        found = config.values.get("rope_scaling") or parameters or {}
        if not isinstance(found, dict):
            raise config.error("rope_scaling", f"{show(found)} is not an object")
        own = {"attention_factor": 1.0, **found, "rope_theta": config.positive_number("compress_rope_theta", 160_000.0)}
        config = config.replacing(rope_scaling=None, rope_parameters=own)
    rope = read_rope(config, head_dim=head_dim, default_theta=None, layer_type="compress", is_interleaved=True)
    return replace(rope, partial_rotary_factor=1.0)  # of the numbers that are rotated


def _layer_types(config: ModelFile) -> list[str]:
    """Read the kinds of layers, by name or by the rates of their keys; if both are absent, the first three layers
    compress heavily, and then every second one."""
    count = config.num_layers()
    if config.has("layer_types") or not config.has("compress_ratios"):
        kinds = config.of_layers("layer_types", may_be_longer=True) or []
        known: tuple[Any, ...] = SLIDING, _SPARSE, _HEAVY
    else:
        kinds, known = config.of_layers("compress_ratios", may_be_longer=True) or [], tuple(_RATES)
    if others := [one for one in kinds if one not in known]:
        key = "layer_types" if config.has("layer_types") else "compress_ratios"
        raise config.error(key, f"{show(others[0])} is not supported, only {', '.join(map(str, known))}")
    if not kinds:
        return [_SPARSE if number > 2 and number % 2 else _HEAVY for number in range(count)]
    return [_RATES.get(one, one) for one in kinds]


def _mlp_types(config: ModelFile) -> Sequence[str]:
    """Read which layers look up their experts: the layers named in `mlp_layer_types`, or the first
    `num_hash_layers`."""
    key, count = "mlp_layer_types", config.num_layers()
    if not config.has(key):
        first = config.get("num_hash_layers", int, 3)
        return [_HASHED if number < first else _CHOSEN for number in range(count)]
    types = config.of_layers(key, may_be_longer=True) or []
    if others := [one for one in types if one not in (_HASHED, _CHOSEN)]:
        raise config.error(key, f"{show(others[0])} is not supported, only {_HASHED} and {_CHOSEN}")
    return types


DEEPSEEK_V4 = Family(
    name="DeepSeek-V4",
    architectures=("DeepseekV4ForCausalLM",),
    features="one key for all heads, which is the value, too, of each token in a window and of several tokens each "
    "before it (CSA, HCA); experts, looked up by token in the first layers; several "
    "residual streams (mHC)",
    examples=("deepseek-ai/DeepSeek-V4-Flash",),
    read=read,
    defaults={
        "head_dim": 512,
        "n_shared_experts": 1,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "q_lora_rank": 1024,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
    },
)
