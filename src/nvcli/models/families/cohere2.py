"""Cohere's models, with attention and MLP side by side and LayerNorm without a bias: Command R and Aya; Command R7B and
Command A (Cohere 2, https://arxiv.org/abs/2504.00698), with full attention without rotary positions in every fourth
layer; Command A+ has experts. Compass rotates each kind of layers in a way of its own. Aya Vision, Command A
Vision and Compass read images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from nvcli.models.checkpoint_layout import PLAIN_LAYOUT, CheckpointLayout
from nvcli.models.families.deepseek_experts import SHARED_EXPERT
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import FULL, SLIDING, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.mixers.mlp import MLPConfig
from nvcli.models.vision.qwen import read_compass_vision
from nvcli.models.vision.siglip import read_aya_vision, read_command_vision

_SCORING: dict[str, Literal["softmax", "sigmoid"]] = {"softmax": "softmax", "sigmoid": "sigmoid"}


def read_cohere(config: ModelFile) -> DecoderConfig:
    """Read full attention in every layer, in Command R+ with a norm of each head."""
    qk_norm = "own" if config.get("use_qk_norm", bool, False) else None
    attention = config.attention(bias=config.bias(), qk_norm=qk_norm, rope=config.rope(500_000.0, is_interleaved=True))
    return _decoder(config, _layer(attention, config.mlp()), _layer_norm(config))


def read(config: ModelFile) -> DecoderConfig:
    """Read windows and rotary positions; layers have either both or neither."""
    local, full = _attention(config)
    mlp = config.mlp()
    layers = (_layer(local if kind == SLIDING else full, mlp) for kind in config.every_nth_full(4))
    return _decoder(config, layers, _layer_norm(config))


def read_moe(config: ModelFile) -> DecoderConfig:
    """Read experts in all layers but the first dense ones, which may have a pattern of windows of their own, and
    rotate if that pattern has no windows."""
    experts = _experts(config)
    is_sparse = config.sparse_layers(default=0)
    dense: MLPConfig | ExpertsConfig = experts
    if not all(is_sparse):
        dense = config.mlp(size_key="prefix_dense_intermediate_size")
    local, full = _attention(config)
    rotates_dense = config.get("prefix_dense_sliding_window_pattern", int, 1) == 1
    full_of_dense = replace(full, rope=local.rope) if rotates_dense else full
    layers = (
        _layer(local if kind == SLIDING else full if sparse else full_of_dense, experts if sparse else dense)
        for kind, sparse in zip(_moe_kinds(config, is_sparse.count(False)), is_sparse, strict=True)
    )
    norm = config.rms_norm() if config.has("rms_norm_eps") else _layer_norm(config)
    return _decoder(config, layers, norm, layout=CheckpointLayout(renamed=(SHARED_EXPERT,)))


def read_compass(config: ModelFile) -> DecoderConfig:
    """Read Compass. `layer_types` says which layers have a window, and `rope_parameters` how each kind rotates; null:
    not at all."""
    ropes, bias, layers = config.object("rope_parameters").values, config.bias(), {}
    for kind in (FULL, SLIDING):
        rope = config.rope(layer_type=kind) if ropes.get(kind, {}) is not None else None
        attention = config.attention(rope=rope, bias=bias, window=config.window_of(kind, 4096))
        layers[kind] = _layer(attention, config.mlp())
    kinds = config.layer_types() or [FULL] * config.num_layers()
    config = config.replacing(logit_scale=config.positive_number("logit_scale", 1.0))
    return _decoder(config, (layers[kind] for kind in kinds), _layer_norm(config))


def _experts(config: ModelFile) -> ExpertsConfig:
    """Read how experts are chosen and combined: with `average`, the sum of the routed and the shared ones is halved."""
    scoring = config.choice("expert_selection_fn", _SCORING, "softmax")
    factor = config.choice("shared_expert_combination_strategy", {"sum": 1.0, "average": 0.5}, "average")
    num_shared = config.get("num_shared_experts", int, 0)
    factor = factor if num_shared > 0 else 1.0
    routing = config.routing(
        scoring=scoring,
        renormalise=scoring == "softmax" or config.get("norm_topk_prob", bool, True),
        scale=factor,
    )
    shared = None
    if num_shared > 0:
        shared = replace(config.mlp(), intermediate_size=num_shared * config.positive("intermediate_size"))
    return config.experts(routing, size_key="intermediate_size", shared=shared, shared_factor=factor)


def _attention(config: ModelFile) -> tuple[AttentionConfig, AttentionConfig]:
    """Return attention with a window and full attention, which are the same in a model without windows."""
    bias, window = config.bias(), config.window(4096)
    local = config.attention(window=config.bounded(window), bias=bias, rope=config.rope(is_interleaved=True))
    full = replace(local, window=None, rope=None)
    return (full if window is None else local), full


def _layer(attention: AttentionConfig, mlp: MLPConfig | ExpertsConfig) -> LayerConfig:
    return LayerConfig(mixer=attention, mlp=mlp, norms=LayerNorms(before_mlp=None))


def _layer_norm(config: ModelFile) -> NormConfig:
    return NormConfig(eps=config.positive_number("layer_norm_eps", 1e-5), kind="layer")


def _decoder(
    config: ModelFile,
    layers: LayerConfig | Iterable[LayerConfig],
    norm: NormConfig,
    layout: CheckpointLayout = PLAIN_LAYOUT,
) -> DecoderConfig:
    logit_scale = config.positive_number("logit_scale", 0.0625)
    return config.decoder(layers, norm=norm, logit_scale=logit_scale, layout=layout)


def _moe_kinds(config: ModelFile, num_dense: int) -> list[str]:
    """Read `layer_types`; if they are absent, the first dense layers and the others count theirs separately."""
    types = config.layer_types()
    if types is not None:
        return types
    dense = config.positive("prefix_dense_sliding_window_pattern", 1)
    others = config.positive("sliding_window_pattern", 4)
    numbers = [(number + 1) % dense for number in range(num_dense)]
    numbers += [(number + 1) % others for number in range(config.num_layers() - num_dense)]
    return [FULL if number == 0 else SLIDING for number in numbers]


COHERE = Family(
    name="Command R, Aya",
    architectures=("CohereForCausalLM",),
    features="attention and MLP side by side, LayerNorm",
    examples=("CohereLabs/c4ai-command-r-08-2024", "CohereLabs/aya-expanse-8b"),
    read=read_cohere,
    ties_embeddings=True,
    keys={"model_max_length": "max_position_embeddings"},
)
COHERE2 = Family(
    name="Command R7B, Command A",
    architectures=("Cohere2ForCausalLM",),
    features="attention and MLP side by side, windows in three of four layers",
    examples=("CohereLabs/c4ai-command-r7b-12-2024", "CohereLabs/c4ai-command-a-03-2025"),
    read=read,
    ties_embeddings=True,
)
AYA_VISION = Family(
    name="Aya Vision",
    architectures=("AyaVisionForConditionalGeneration",),
    features="Command R7B with a vision tower (SigLIP), which sees images as marked tiles",
    examples=("CohereLabs/aya-vision-8b",),
    read=read,
    read_vision=read_aya_vision,
    ties_embeddings=True,
)
COMMAND_A_VISION = Family(
    name="Command A Vision",
    architectures=("Cohere2VisionForConditionalGeneration",),
    features="Command A with a vision tower (SigLIP), which sees images as marked tiles",
    examples=("CohereLabs/command-a-vision-07-2025",),
    read=read,
    read_vision=read_command_vision,
    ties_embeddings=True,
)
COHERE2_MOE = Family(
    name="Command A+",
    architectures=("Cohere2MoeForCausalLM",),
    features="as Command A, with a mixture of experts",
    examples=("CohereLabs/command-a-plus-05-2026",),
    read=read_moe,
    ties_embeddings=True,
)
COHERE_COMPASS = Family(
    name="Cohere Compass",
    architectures=("CohereCompassForCausalLM", "CohereCompassForConditionalGeneration"),
    features="as Command R7B, with the vision tower of Qwen3-VL; a rotation for each kind of layers",
    examples=("CohereLabs/North-Micro-Vision-Instruct",),
    read=read_compass,
    read_vision=read_compass_vision,
    ties_embeddings=True,
)
