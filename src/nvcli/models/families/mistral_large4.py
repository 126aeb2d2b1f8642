"""Mistral Large 4 (https://huggingface.co/mistralai/Mistral-Large-4-1T-A52B): latent attention to keys that indexers
choose, with queries whose heads are scaled by their position and frequencies that are learned. Some layers rotate
nothing, and some of these read the latent vectors of an earlier one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import SHARED_EXPERT, shared_experts
from nvcli.models.families.family import Family
from nvcli.models.families.latent_attention import (
    choosing_layers,
    read_chosen_keys,
    read_latent_attention,
    with_indexers,
)
from nvcli.models.families.llama import rotating_layers
from nvcli.models.families.mistral import MIXTRAL_NAMES
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.latent_attention import LatentAttentionConfig
from nvcli.models.rope_config import LEARNED_FREQUENCIES
from nvcli.models.vision.pixtral import read_mistral_large4_vision

_SOURCES = "kv_source_layers"
_STARTS = (
    ("tok_embeddings.", "model.embed_tokens."),
    ("lerope.alpha", LEARNED_FREQUENCIES),
    ("layers.", "model.layers."),
    ("norm.", "model.norm."),
    ("output.", "lm_head."),
)
_NAMES = (
    (".attention.", ".self_attn."),
    (".wq.", ".q_proj."),
    (".wkv_a_with_mqa.", ".kv_a_proj_with_mqa."),
    (".wkv_b.", ".kv_b_proj."),
    (".wo.", ".o_proj."),
    (".kv_a_norm.", ".kv_a_layernorm."),
    (".ssmax_scaling.s", ".softmax_scaling.scale"),
    (".ssmax_scaling.b", ".softmax_scaling.bias"),
    (".attention_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".feed_forward.", ".mlp."),
    (".gate.", ".mlp.gate."),
    (".experts.", ".mlp.experts."),
    (".shared_experts.", ".mlp.shared_experts."),
    SHARED_EXPERT,
    *MIXTRAL_NAMES,
)
"""The names in published files, which transformers writes too, and in the decoder."""


def read(config: ModelFile) -> DecoderConfig:
    """Read the text model. A head that drafts tokens stays on disk."""
    if config.get("n_group", int, 1) > 1:
        raise config.error("n_group", "groups of experts are not supported here; supported: 1")
    routing = config.routing(
        keys=("n_routed_experts", "num_local_experts", "num_experts"),
        renormalise=True,
        scale=config.positive_number("routed_scaling_factor", 1.0),
    )
    experts = config.experts(routing, has_wide_router=True, shared=shared_experts(config, "n_shared_experts"))
    mlps = config.mlps(experts, config.sparse_layers())
    layers = (LayerConfig(mixer=mixer, mlp=mlp) for mixer, mlp in zip(_mixers(config), mlps, strict=True))
    layout = CheckpointLayout(starts=_STARTS, renamed=_NAMES)
    cap = config.positive_number("final_logit_softcapping", 30.0)
    return with_indexers(config.decoder(layers, layout=layout, logit_soft_cap=cap))


def _mixers(config: ModelFile) -> Iterator[LatentAttentionConfig]:
    """Read the attention of each layer."""
    config = config.replacing(q_lora_rank=None)  # queries are projected from the block's input
    rotated = read_latent_attention(config, is_interleaved=True)
    assert rotated.rope is not None
    rotated = replace(
        rotated,
        rope=replace(rotated.rope, is_learned=True),
        norm_eps=config.rms_norm().eps,
        scales_heads=True,
    )
    rotated = read_chosen_keys(config, rotated, is_interleaved=True, reads_input=True, scales_queries=True)
    plain = replace(rotated, rope=None, rope_dim=0, plain_dim=rotated.query_dim)
    rotates, chooses = rotating_layers(config), choosing_layers(config)
    sources = _source_layers(config, rotates)
    for number, source in enumerate(sources):
        mixer = rotated if rotates[number] else plain
        readers = [reader for reader, found in enumerate(sources) if found == source]
        if len(readers) > 1:
            assert mixer.indexer is not None
            dims = tuple(mixer.indexer.kept_dim * chooses[reader] for reader in readers)
            mixer = replace(
                mixer,
                reads_kv_of=None if source == number else source,
                index_dims=dims,
                index_number=readers.index(number),
            )
        yield mixer if chooses[number] else replace(mixer, indexer=None)


def _source_layers(config: ModelFile, rotates: list[bool]) -> list[int]:
    """Read the layer whose latent vectors each layer reads: itself, or an earlier one that has its own."""
    count, found = config.num_layers(), config.values.get(_SOURCES)
    if found is None:
        return list(range(count))
    if not isinstance(found, list) or len(found) != count or not all(type(one) is int for one in found):
        raise config.error(_SOURCES, f"{show(found)} is not a list of {count} layer numbers")
    for number, source in enumerate(found):
        if not 0 <= source <= number or found[source] != source:
            raise config.error(_SOURCES, f"layer {number} reads {source}, which has no latent vectors before it")
        if rotates[source] != rotates[number]:
            raise config.error(_SOURCES, f"of layers {source} and {number}, which share keys, one rotates them")
    return found


MISTRAL_LARGE4 = Family(
    name="Mistral Large 4",
    architectures=("MistralLarge4ForConditionalGeneration",),
    features="latent attention to keys that an indexer chooses (DSA), queries scaled by their position, layers without "
    "rotation, shared keys; a mixture of experts; with a vision tower (Pixtral)",
    examples=("mistralai/Mistral-Large-4-1T-A52B",),
    read=read,
    read_vision=read_mistral_large4_vision,
    defaults={
        "index_n_heads": 32,
        "n_shared_experts": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 2048.0,
            "original_max_position_embeddings": 512,
            "attention_factor": 1.0,
        },
    },
)
