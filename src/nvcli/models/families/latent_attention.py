"""The reader of multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434), which several families
share."""

from __future__ import annotations

import math
from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.families.model_file import MAX_HEAD_DIM, ModelFile
from nvcli.models.layer_config import DecoderConfig
from nvcli.models.mixers.attention import QueryScaling
from nvcli.models.mixers.latent_attention import STORED_INDEX_NAMES, IndexerConfig, LatentAttentionConfig
from nvcli.models.rope_config import RopeConfig, read_rope, rope_section

_CHOOSES, _SHARES = ("full", "F"), ("shared", "S")
"""Names in files for layers that choose their keys, and for layers that reuse the choice of the layer before them."""
_LARGEST_FACTOR = 1000
"""The largest factor of scores where a context is stretched; more than any model has."""
_NORM_EPS = 1e-6
"""The epsilon of the norms of latent vectors, which transformers does not take from config.json."""


def read_latent_attention(
    config: ModelFile,
    *,
    is_interleaved: bool,
    counts_whole_head: bool = False,
    query_scaling: QueryScaling | None = None,
) -> LatentAttentionConfig:
    """Read the attention of all layers. `counts_whole_head`: `partial_rotary_factor` is a part of whole heads, and not
    of their rotated numbers."""
    plain_dim = config.positive("qk_nope_head_dim", most=MAX_HEAD_DIM)
    rope_dim = config.positive("qk_rope_head_dim", most=MAX_HEAD_DIM)
    if rope_dim % 2:
        raise config.error("qk_rope_head_dim", f"{rope_dim} is odd; rotary embedding pairs dimensions")
    head_dim = plain_dim + rope_dim if counts_whole_head else rope_dim
    rope = read_rope(
        config,
        head_dim=head_dim,
        default_theta=10_000.0,
        is_interleaved=is_interleaved,
        default_partial=rope_dim / head_dim,
    )
    if rope.rotary_dim(head_dim) != rope_dim:
        raise rope_section(config).error(
            "partial_rotary_factor",
            f"{show(rope.partial_rotary_factor)} of {head_dim} dimensions are not the {rope_dim} of `qk_rope_head_dim`",
        )
    query_rank = config.positive("q_lora_rank") if config.has("q_lora_rank") else None
    bias = config.bias()
    if bias and query_rank is None:
        raise config.error("attention_bias", "true is not supported together with `q_lora_rank` null")
    return LatentAttentionConfig(
        num_heads=config.positive("num_attention_heads"),
        query_rank=query_rank,
        latent_dim=config.positive("kv_lora_rank", most=MAX_HEAD_DIM),
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        value_dim=config.positive("v_head_dim", most=MAX_HEAD_DIM),
        scale=(plain_dim + rope_dim) ** -0.5 * _score_factor(config, rope),
        rope=replace(rope, partial_rotary_factor=1.0),
        norm_eps=_NORM_EPS,
        bias=bias,
        query_scaling=query_scaling,
    )


def read_chosen_keys(
    config: ModelFile, attention: LatentAttentionConfig, *, is_interleaved: bool, **traits: bool
) -> LatentAttentionConfig:
    """Read the choice of keys that layers with an indexer of their own make. `is_interleaved`: the default of its
    rotation; `traits`: other fields of `IndexerConfig`."""
    if attention.query_rank is None and not traits.get("reads_input"):
        raise config.error("q_lora_rank", "null is not supported together with `index_topk`")
    head_dim = config.positive("index_head_dim", 128, most=MAX_HEAD_DIM)
    if head_dim < attention.rope_dim:
        raise config.error("index_head_dim", f"{head_dim} is less than `qk_rope_head_dim`, {attention.rope_dim}")
    indexer = IndexerConfig(
        num_heads=config.positive("index_n_heads", 64),
        head_dim=head_dim,
        is_interleaved=config.get("indexer_rope_interleave", bool, is_interleaved),
        **traits,
    )
    return replace(attention, top_k=config.positive("index_topk", 2048), indexer=indexer)


def choosing_layers(config: ModelFile) -> list[bool]:
    """Read which layers choose their keys, from a list or a schedule."""
    count = config.num_layers()
    for key in filter(config.has, ("indexer_types", "index_topk_pattern")):
        kinds, known = config.values[key], (*_CHOOSES, *_SHARES)
        if not isinstance(kinds, (list, str)) or len(kinds) != count or any(kind not in known for kind in kinds):
            raise config.error(key, f"{show(kinds)} does not say {_CHOOSES[0]} or {_SHARES[0]} of {count} layers")
        if kinds[0] not in _CHOOSES:
            raise config.error(key, "the first layer has none before it whose choice it could take")
        return [kind in _CHOOSES for kind in kinds]
    period, offset = max(1, config.get("index_topk_freq", int, 1)), config.get("index_skip_topk_offset", int, 2)
    return [max(0, number + 1 - offset) % period == 0 for number in range(count)]


def with_indexers(decoder: DecoderConfig) -> DecoderConfig:
    """Return a decoder with the names that files have for what its indexers read."""
    layout = decoder.layout
    return replace(decoder, layout=replace(layout, renamed=(*layout.renamed, *STORED_INDEX_NAMES)))


def _score_factor(config: ModelFile, rope: RopeConfig) -> float:
    """Return the factor by which scores grow where rope stretches the context (`mscale_all_dim`)."""
    weight = rope_section(config).get("mscale_all_dim", float, 0.0)
    if rope.rope_type == "default" or not weight or rope.factor <= 1:
        return 1.0
    factor = 0.1 * weight * math.log(rope.factor) + 1.0
    if not 0 < factor <= _LARGEST_FACTOR:
        problem = f"{show(weight)} gives a factor of {factor:g}; allowed: above 0, up to {_LARGEST_FACTOR:,}"
        raise rope_section(config).error("mscale_all_dim", problem)
    return factor**2
