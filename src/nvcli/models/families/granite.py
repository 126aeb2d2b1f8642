"""Granite 3 and 4 (https://arxiv.org/abs/2505.08699): Llama's layers with four multipliers, in some models with experts
(https://arxiv.org/abs/2408.13359), with windows and sinks, or (Granite 4) with Mamba-2 in place of attention in most
layers. HyperCLOVA X (https://huggingface.co/naver-hyperclovax/HyperCLOVAX-SEED-Think-14B) has norms of the blocks'
outputs besides.

A block's output is multiplied by `residual_multiplier` before it is added to the residual stream. A norm does not
depend on the scale of its input, except through its epsilon: so the stream is kept divided by that number instead, and
blocks add their outputs as they are. Where these are normed, the norms' weights are multiplied by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nvcli.models.checkpoint_layout import PLAIN_LAYOUT, CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.mamba import ATTENTION, MAMBA, read_mamba
from nvcli.models.families.model_file import FULL, NORMS_BEFORE, ModelFile, read_by_type
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.mixers.mixer import Mixer, NormConfig
from nvcli.models.mixers.mlp import MLPConfig
from nvcli.models.vision.granite import read_granite_vision
from nvcli.models.vision.qwen import read_hyperclovax_vision

_STARTS = (("model.language_model.model.", "model.language_model."), ("model.language_model.lm_head.", "lm_head."))
"""Names of HyperCLOVA X in published files of a model with vision, and in those of transformers."""
_EXPERTS_LAYOUT = CheckpointLayout(
    renamed=(
        ("block_sparse_moe.input_linear.weight", "mlp.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "mlp.experts.down_proj"),
        ("block_sparse_moe.router.layer.", "mlp.gate."),
        ("block_sparse_moe.router.", "mlp.gate."),
        ("block_sparse_moe.experts.", "mlp.experts."),
        ("shared_mlp.input_linear.", "mlp.shared_expert.gate_up_proj."),
        ("shared_mlp.output_linear.", "mlp.shared_expert.down_proj."),
    )
)
_DENSE_LAYOUT = CheckpointLayout(
    renamed=(("shared_mlp.input_linear.", "mlp.gate_up_proj."), ("shared_mlp.output_linear.", "mlp.down_proj."))
)


def read_granite(config: ModelFile) -> DecoderConfig:
    """Read Granite 3."""
    return _read_llama(config, NORMS_BEFORE)


def read_hyperclovax(config: ModelFile) -> DecoderConfig:
    """Read HyperCLOVA X, whose logits are multiplied by `logits_scaling`."""
    config = config.replacing(logits_scaling=1 / config.positive_number("logits_scaling", 1.0))
    if not config.has("attention_multiplier"):
        config = config.replacing(attention_multiplier=config.head_dim() ** -0.5)
    if not config.get("use_post_norm", bool, True):
        return _read_llama(config, NORMS_BEFORE)
    residual = config.positive_number("residual_multiplier", 1.0)
    norms = LayerNorms(after_attention="post_norm1", after_mlp="post_norm2", factor_after=residual)
    return _read_llama(config.replacing(residual_multiplier=1.0), norms)


def read_hyperclovax_with_vision(config: ModelFile) -> DecoderConfig:
    """Read HyperCLOVA X, before whose names published files have others."""
    decoder = read_hyperclovax(config)
    return replace(decoder, layout=replace(decoder.layout, starts=_STARTS))


def read_granite_with_vision(config: ModelFile) -> DecoderConfig:
    """Read Granite 3 or 4, whose layers get images' tokens that are not scaled as those of text."""
    decoder = read_by_type(config, _TEXT_PARTS, "granite4_vision_text")
    return replace(decoder, image_scale=decoder.deep_scale)


def _read_llama(config: ModelFile, norms: LayerNorms) -> DecoderConfig:
    config.layer_types(supported=(FULL,))
    mlp, layout = _mlp(config)
    return _read(config, [_attention(config, rotates=True)] * config.num_layers(), mlp, layout, norms)


def read_granite_swa(config: ModelFile) -> DecoderConfig:
    """Read a model with sinks, in which three of four layers have windows, and each may have a theta of its own."""
    full = replace(_attention(config, rotates=True), has_sinks=True)
    by_kind = config.by_kind(full, 128)
    mixers = [by_kind[kind] for kind in config.layer_kinds(lambda number: number % 4 == 0)]
    if config.has("layer_rope_theta"):
        mixers = [_with_theta(mixer, theta) for mixer, theta in zip(mixers, _thetas(config), strict=True)]
    return _read(config, mixers, *_mlp(config))


def _thetas(config: ModelFile) -> list[float]:
    """Read the theta of each layer; 0: it does not rotate."""
    key = "layer_rope_theta"
    thetas = enumerate(config.of_layers(key) or ())
    numbers = config.with_values({str(number): theta for number, theta in thetas}, f"{config.section}{key}.")
    return [numbers.positive_number(name) if numbers.values[name] != 0 else 0.0 for name in numbers.values]


def _with_theta(attention: AttentionConfig, theta: float) -> AttentionConfig:
    assert attention.rope is not None
    return replace(attention, rope=replace(attention.rope, theta=theta) if theta else None)


def _mlp(config: ModelFile) -> tuple[MLPConfig | ExpertsConfig, CheckpointLayout]:
    """Read a dense MLP, or experts and what all tokens share beside them if there is anything."""
    if not config.has("num_local_experts"):
        return config.mlp(bias=config.mlp_bias()), PLAIN_LAYOUT
    size_key = "shared_intermediate_size"
    shared = config.mlp(size_key=size_key) if config.get(size_key, int, 0) else None
    return _experts(config, shared), _EXPERTS_LAYOUT


def _experts(config: ModelFile, shared: MLPConfig | None) -> ExpertsConfig:
    """Read experts whose weights for a token add up to 1."""
    routing = config.routing(keys=("num_local_experts",), renormalise=True)
    return config.experts(routing, size_key="intermediate_size", shared=shared)


def read_granite4(config: ModelFile) -> DecoderConfig:
    """Read Granite 4: layers of Mamba-2 or attention, each with an MLP, and in the larger models with experts beside
    it."""
    attention = _attention(config, rotates=config.values.get("position_embedding_type") == "rope")
    mixers = [attention if kind in ATTENTION else read_mamba(config) for kind in _layer_types(config)]
    dense = config.mlp(size_key="shared_intermediate_size")
    if not config.get("num_local_experts", int, 8):
        return _read(config, mixers, dense, _DENSE_LAYOUT)
    return _read(config, mixers, _experts(config, dense), _EXPERTS_LAYOUT)


def _layer_types(config: ModelFile) -> list[str]:
    """Read which layers have attention; by default none has."""
    key = next(filter(config.has, ("layer_types", "layers_block_type")), None)
    kinds = None if key is None else config.of_layers(key, (*ATTENTION, *MAMBA))
    return kinds or ["mamba"] * config.num_layers()


def _attention(config: ModelFile, *, rotates: bool) -> AttentionConfig:
    bias = config.bias()
    scale = config.positive_number("attention_multiplier", 1.0)
    return config.attention(scale=scale, bias=bias, rope=config.rope() if rotates else None)


def _read(
    config: ModelFile,
    mixers: Sequence[Mixer],
    mlp: MLPConfig | ExpertsConfig,
    layout: CheckpointLayout,
    norms: LayerNorms = NORMS_BEFORE,
) -> DecoderConfig:
    residual = config.positive_number("residual_multiplier", 1.0)
    scale = config.positive_number("embedding_multiplier", 1.0) / residual
    return config.decoder(
        [LayerConfig(mixer=mixer, mlp=mlp, norms=norms) for mixer in mixers],
        norm=NormConfig(eps=config.positive_number("rms_norm_eps") / residual**2),
        embedding_scale=scale,
        image_scale=scale,
        deep_scale=1 / residual,
        logit_scale=1 / config.positive_number("logits_scaling", 1.0),
        layout=layout,
    )


GRANITE = Family(
    name="Granite 3",
    architectures=("GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    features="multipliers of embeddings, residuals, scores and logits; a mixture of experts in some models",
    examples=("ibm-granite/granite-3.3-8b-instruct", "ibm-granite/granite-3.1-3b-a800m-instruct"),
    read=read_granite,
)
GRANITE_SWA = Family(
    name="Granite SWA",
    architectures=("GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"),
    features="as Granite 3, with windows in three of four layers and a sink for each head",
    examples=("ibm-granite/granite-swash-2b", "ibm-granite/granite-swash-3b-a600m"),
    read=read_granite_swa,
)
HYPERCLOVAX = Family(
    name="HyperCLOVA X",
    architectures=("HyperCLOVAXForCausalLM",),
    features="as Granite 3, with norms before and after each block",
    examples=("naver-hyperclovax/HyperCLOVAX-SEED-Think-14B",),
    read=read_hyperclovax,
)
HYPERCLOVAX_VISION = Family(
    name="HyperCLOVA X with vision",
    architectures=("HCXVisionV2ForCausalLM", "HyperCLOVAXVisionV2ForConditionalGeneration"),
    features="HyperCLOVA X with the vision tower of Qwen2.5-VL, which attends within windows",
    examples=("naver-hyperclovax/HyperCLOVAX-SEED-Think-32B",),
    read=read_hyperclovax_with_vision,
    read_vision=read_hyperclovax_vision,
    ties_embeddings=True,
)
_TEXT_PARTS = {"granite4_vision_text": read_granite, "granite": read_granite, "granitemoehybrid": read_granite4}

GRANITE_VISION = Family(
    name="Granite 4 Vision",
    architectures=("Granite4VisionForConditionalGeneration",),
    features="Granite 3 or 4 with a vision tower (SigLIP), from several layers of which the decoder reads",
    examples=("ibm-granite/granite-vision-4.1-4b", "ibm-granite/granite-4.0-3b-vision"),
    read=read_granite_with_vision,
    read_vision=read_granite_vision,
    ties_as_text=True,
)
GRANITE4 = Family(
    name="Granite 4",
    architectures=("GraniteMoeHybridForCausalLM",),
    features="as Granite 3; Mamba-2 layers between layers of attention; a mixture of experts in the larger models",
    examples=("ibm-granite/granite-4.0-h-small", "ibm-granite/granite-4.0-micro"),
    read=read_granite4,
)
