"""Mistral (https://arxiv.org/abs/2310.06825), Mixtral (https://arxiv.org/abs/2401.04088), Ministral 8B, whose
`layer_types` say which layers have windows, Ministral 3, whose queries are scaled by their position, and Mistral 4,
which has latent attention.

Mistral Large 4 (https://huggingface.co/mistralai/Mistral-Large-4-1T-A52B) has latent attention to keys that indexers
choose, with queries whose heads are scaled by their position and frequencies that are learned. Some layers rotate
nothing, and some of these read the latent vectors of an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import (
    SHARED_EXPERT,
    first_layers_dense,
    layout_without_predictions,
    shared_experts,
)
from nvcli.models.families.family import Family
from nvcli.models.families.latent_attention import (
    choosing_layers,
    read_chosen_keys,
    read_latent_attention,
    with_indexers,
)
from nvcli.models.families.llama import rotating_layers
from nvcli.models.families.model_file import FULL, SLIDING, ModelFile, read_by_type
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import QueryScaling
from nvcli.models.mixers.latent_attention import LatentAttentionConfig
from nvcli.models.rope_config import LEARNED_FREQUENCIES, rope_section
from nvcli.models.vision.pixtral import read_mistral3_vision, read_mistral_large4_vision

DEFAULT_WINDOW = 4096
"""The default of `sliding_window` in transformers."""


def read_mistral(config: ModelFile) -> DecoderConfig:
    """Read the window of all layers; `layer_types` may say the same."""
    window = config.window(DEFAULT_WINDOW)
    config.layer_types(supported=(FULL if window is None else SLIDING,))
    layer = LayerConfig(
        mixer=config.attention(window=config.bounded(window), rope=config.rope(default_theta=None)), mlp=config.mlp()
    )
    return config.decoder(layer)


MISTRAL = Family(
    name="Mistral",
    architectures=("MistralForCausalLM",),
    features="a window in all layers, or in none",
    examples=("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-Nemo-Instruct-2407"),
    read=read_mistral,
)


def read_ministral(config: ModelFile) -> DecoderConfig:
    """Read windows by layer; without `layer_types`, a window applies to all layers."""
    window = config.window(DEFAULT_WINDOW)
    kinds = config.layer_kinds(lambda _: window is None)
    attention, mlp = config.attention(rope=config.rope()), config.mlp()
    windows = (config.bounded(window) if kind == SLIDING else None for kind in kinds)
    return config.decoder(LayerConfig(mixer=replace(attention, window=one), mlp=mlp) for one in windows)


def _query_scaling(config: ModelFile) -> QueryScaling | None:
    """Read the scaling of queries (`llama_4_scaling_beta`) beside YaRN; None: there is none."""
    rope = rope_section(config)
    if not rope.get("llama_4_scaling_beta", float, 0.0):
        return None
    return QueryScaling(
        beta=rope.positive_number("llama_4_scaling_beta"),
        length=rope.positive("original_max_position_embeddings"),
    )


def read_ministral3(config: ModelFile) -> DecoderConfig:
    """Read Ministral 3, whose queries may be scaled by their position."""
    scaling = _query_scaling(config)
    window = config.bounded(config.window())
    layer = LayerConfig(
        mixer=config.attention(window=window, query_scaling=scaling, rope=config.rope(1_000_000.0)),
        mlp=config.mlp(),
    )
    return config.decoder(layer)


def read_mistral4(config: ModelFile) -> DecoderConfig:
    """Read Mistral 4: latent attention with scaled queries, and a mixture of experts chosen by a softmax."""
    attention = read_latent_attention(
        config,
        is_interleaved=config.get("rope_interleave", bool, True),
        counts_whole_head=True,
        query_scaling=_query_scaling(config),
    )
    if config.get("n_group", int, 1) > 1:
        raise config.error("n_group", "groups of experts are not supported here; supported: 1")
    routing = config.routing(
        keys=("n_routed_experts", "num_local_experts"),
        renormalise=config.get("norm_topk_prob", bool, True),
        scale=config.positive_number("routed_scaling_factor", 1.0),
    )
    experts = config.experts(routing, shared=shared_experts(config, "n_shared_experts"))
    layers = (LayerConfig(mixer=attention, mlp=mlp) for mlp in first_layers_dense(config, experts))
    return config.decoder(layers, layout=layout_without_predictions(config))


_TEXT_PARTS = {
    "mistral": read_mistral,
    "ministral": read_ministral,
    "ministral3": read_ministral3,
    "mistral4": read_mistral4,
}
"""The text parts of Mistral Small 3.1 and later, of Ministral 3 and of Mistral 4."""


MINISTRAL = Family(
    name="Ministral",
    architectures=("MinistralForCausalLM",),
    features="windows by layer",
    examples=("mistralai/Ministral-8B-Instruct-2410",),
    read=read_ministral,
)
MINISTRAL3 = Family(
    name="Ministral 3",
    architectures=("Ministral3ForCausalLM",),
    features="queries scaled by their position",
    examples=("mistralai/Ministral-3-8B-Instruct-2512-BF16",),
    read=read_ministral3,
)
MISTRAL4 = Family(
    name="Mistral 4",
    architectures=("Mistral4ForCausalLM",),
    features="latent attention; queries scaled by their position; a mixture of experts, and one that all tokens share",
    examples=("mistralai/Mistral-Small-4-119B-2603",),
    read=read_mistral4,
)
MISTRAL3 = Family(
    name="Mistral Small 3, Ministral 3 with vision",
    architectures=("Mistral3ForConditionalGeneration",),
    features="as Mistral or Ministral 3, with a vision tower (Pixtral)",
    examples=("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistralai/Ministral-3-14B-Instruct-2512-BF16"),
    read=lambda config: read_by_type(config, _TEXT_PARTS, "mistral"),
    read_vision=read_mistral3_vision,
    defaults={"sliding_window": None},
)


MIXTRAL_NAMES = (
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
)
"""The names of the experts' tensors in files and in the decoder."""


def read_mixtral(config: ModelFile) -> DecoderConfig:
    """Read one window for all layers, or none. The weights of a token's experts add up to 1."""
    attention = config.attention(window=config.bounded(config.window()), rope=config.rope(1_000_000.0))
    experts = config.experts(config.routing(renormalise=True), size_key="intermediate_size")
    layout = CheckpointLayout(renamed=MIXTRAL_NAMES)
    return config.decoder(LayerConfig(mixer=attention, mlp=experts), layout=layout)


MIXTRAL = Family(
    name="Mixtral",
    architectures=("MixtralForCausalLM",),
    features="a mixture of experts",
    examples=("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x22B-Instruct-v0.1"),
    read=read_mixtral,
)


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


def read_large4(config: ModelFile) -> DecoderConfig:
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
    read=read_large4,
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
