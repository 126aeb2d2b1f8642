"""Qwen4-Exp (2026): gated delta nets between layers of gated attention to pools of keys that are chosen (QSA), several
residual streams that are read through gates, experts, and in some layers vectors of n-grams of ids (PLE)."""

from __future__ import annotations

from dataclasses import replace

from nvcli.core.validation import is_integer, show
from nvcli.kernels.elementwise_settings import NormGate
from nvcli.kernels.pool_settings import Pools
from nvcli.kernels.stream_settings import StreamSettings
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import FULL, LINEAR, MAX_HEAD_DIM, ModelFile
from nvcli.models.families.qwen_hybrid import read_delta_net
from nvcli.models.layer_config import MOST_STREAMS, DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import AttentionConfig, OutputGate
from nvcli.models.mixers.mixer import Mixer
from nvcli.models.mixers.ngram_lookup import MOST_IDS, NGramLookupConfig
from nvcli.models.mixers.pooled_index import PooledIndexConfig
from nvcli.models.mtp_config import PREFIX
from nvcli.models.vision.qwen import read_qwen3_5_vision

_INDEXED = "indexed_attention"
_NAMES = (
    (".attn_hyper_connection.hc_norm.", ".input_layernorm."),
    (".mlp_hyper_connection.hc_norm.", ".post_attention_layernorm."),
    (".hyper_connection_mixer.hc_norm.", ".norm."),
    (".attn_hyper_connection.", ".attn_hc."),
    (".mlp_hyper_connection.", ".ffn_hc."),
    (".hyper_connection_mixer.", ".hc_head."),
)
_GATES: dict[str, NormGate] = {"silu": "silu", "sigmoid": "sigmoid"}
_MOST_POOLED = 256
"""The most keys that are chosen together; more than any model has."""
_LONGEST_GRAMS, _MOST_HASHES, _MOST_PARTS = 5, 64, 4096
"""The longest n-grams, the hashes of n-grams of one length, and the parts of a table; more than any model has."""
_MOST_ROWS = 2**29
"""Together with what pads them, rows of a table are counted in 32 bits."""


def read(config: ModelFile) -> DecoderConfig:
    """Read the text model. A head for multi-token prediction stays on disk, because transformers computes none."""
    norm, kinds = config.rms_norm(weight_offset=1.0), _layer_types(config)
    gate = config.choice("output_gate_type", _GATES, config.get("hidden_act", str, "silu"))
    mixers: dict[str, Mixer] = {LINEAR: read_delta_net(config, gate=gate)}
    if _INDEXED in kinds:
        mixers[_INDEXED] = _read_attention(config)
    experts = config.experts(
        config.routing(renormalise=config.get("norm_topk_prob", bool, True)),
        shared=config.mlp(size_key="shared_expert_intermediate_size"),
        gates_shared=True,
    )
    streams = StreamSettings(
        count=config.positive("hc_count", 4, least=2, most=MOST_STREAMS),
        norm_eps=norm.eps,
        eps=0.0,
        factor=2.0,
        gate_rank=config.positive("hc_lowrank", 320),
    )
    lookups = _read_lookups(config, kinds, streams.count)
    layers = (
        LayerConfig(mixer=mixers[kind], mlp=experts, lookup=lookups.get(number)) for number, kind in enumerate(kinds)
    )
    layout = CheckpointLayout(renamed=_NAMES, left=(PREFIX,))
    return config.decoder(layers, norm=norm, layout=layout, streams=streams)


def _layer_types(config: ModelFile) -> list[str]:
    """Read `layer_types`; if they are absent, every `full_attention_interval`-th layer chooses keys."""
    types = config.layer_types(supported=(_INDEXED, FULL, "qwen_sparse_attention", LINEAR))
    if types is not None:
        return [kind if kind == LINEAR else _INDEXED for kind in types]
    interval = config.positive("full_attention_interval", 4)
    return [LINEAR if (number + 1) % interval else _INDEXED for number in range(config.num_layers())]


def _read_attention(config: ModelFile) -> AttentionConfig:
    """Read the attention, and the choice of its keys, which all heads share."""
    config.only(indexer_kv_heads=1)
    rope = config.rope()
    attention = config.attention(qk_norm="head", gate=OutputGate(is_in_queries=True), bias=config.bias(), rope=rope)
    turned = rope.rotary_dim(attention.head_dim)
    head_dim = config.positive("indexer_head_dim", least=turned, most=MAX_HEAD_DIM)
    if head_dim % 2:
        raise config.error("indexer_head_dim", f"{head_dim} is odd; rotary embedding pairs dimensions")
    pool, most = (
        config.positive("indexer_compress_ratio", least=2, most=_MOST_POOLED),
        config.positive("indexer_budget"),
    )
    if most % pool:
        raise config.error(
            "indexer_budget", f"{most} keys are no whole number of pools of {pool} (`indexer_compress_ratio`)"
        )
    index = PooledIndexConfig(
        num_heads=config.positive("indexer_n_heads"),
        head_dim=head_dim,
        pools=Pools(size=pool),
        rope=rope.for_head(turned, head_dim),
    )
    return replace(attention, top_k=most + pool - 1, index=index)


def _read_lookups(config: ModelFile, kinds: list[str], num_streams: int) -> dict[int, NGramLookupConfig]:
    """Read the n-grams of the layers in `ple_layer_ids`, which count from 1."""
    found = config.values.get("ple_layer_ids") or []
    if not isinstance(found, list) or not all(is_integer(number, 1, len(kinds)) for number in found):
        raise config.error("ple_layer_ids", f"{show(found)} is not a list of numbers from 1 to {len(kinds)}")
    if not found:
        return {}
    order = config.positive("ngram_size", 3, least=2, most=_LONGEST_GRAMS)
    num_heads = config.positive("heads_per_ngram", 8, most=_MOST_HASHES)
    hidden_size = config.positive("hidden_size")
    size = config.positive("ple_embed_dim", hidden_size)
    if size % (num_hashes := (order - 1) * num_heads):
        raise config.error("ple_embed_dim", f"{num_hashes} hashes of n-grams do not divide {size}")
    first = NGramLookupConfig(
        num_streams=num_streams,
        hidden_size=hidden_size,
        order=order,
        num_heads=num_heads,
        vector_size=size,
        conv_taps=config.conv_taps("ple_conv_kernel_size"),
        vocab_size=config.positive("vocab_size", most=MOST_IDS),
        separator=_separator(config),
        least_rows=config.positive("ngram_vocab_size_base", 20_000_000, most=_MOST_ROWS // num_hashes),
        place=0,
        seed=config.get("seed", int, 1234),
        rows_multiple=config.positive("make_ngram_vocab_size_divisible_by", 128, most=_MOST_ROWS),
        num_parts=config.positive("split_ngram_parts", 512, most=_MOST_PARTS),
    )
    return {number - 1: replace(first, place=place) for place, number in enumerate(sorted(set(found)))}


def _separator(config: ModelFile) -> int:
    """Read the id that parts texts: the first one that ends answers."""
    found = config.values.get("eos_token_id")
    first = found[0] if isinstance(found, list) and found else found
    if not is_integer(first, 0, MOST_IDS):
        raise config.error("eos_token_id", f"{show(found)} has no id, by which texts are parted for n-grams")
    return first


QWEN4_EXP = Family(
    name="Qwen4-Exp",
    architectures=("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
    features="gated delta nets between layers of gated attention to chosen pools of keys (QSA); several residual "
    "streams, vectors of n-grams (PLE); experts; a vision tower",
    examples=("Qwen/Qwen4-Exp",),
    read=read,
    read_vision=read_qwen3_5_vision,
    defaults={"ple_conv_kernel_size": 4, "linear_conv_kernel_dim": 4},
)
