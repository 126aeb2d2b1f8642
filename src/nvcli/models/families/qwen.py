"""Qwen2 and 2.5 (https://arxiv.org/abs/2407.10671) and Qwen3 (https://arxiv.org/abs/2505.09388), dense and with a
mixture of experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.families.family import Family
from nvcli.models.families.mistral import DEFAULT_WINDOW
from nvcli.models.families.model_file import FULL, SLIDING, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.mixers.mlp import MLPConfig
from nvcli.models.vision.pixtral import read_lighton_vision
from nvcli.models.vision.qwen import (
    read_qwen2_5_omni_vision,
    read_qwen2_5_vision,
    read_qwen2_vision,
    read_qwen3_omni_vision,
    read_qwen3_vision,
)

_DEFAULT_MAX_WINDOW_LAYERS = 28
"""The default of `max_window_layers` in transformers."""
_THINKER = "thinker"


def read_qwen2(config: ModelFile) -> DecoderConfig:
    """Read Qwen2, with biases on queries, keys and values."""
    return _read(config, _qwen2_attention(config))


def read_qwen3(config: ModelFile) -> DecoderConfig:
    """Read Qwen3, with normed queries and keys. `head_dim` must be present: it does not follow from the hidden size."""
    config.positive("head_dim")
    attention = config.attention(qk_norm="head", bias=config.bias(), rope=config.rope(default_theta=None))
    return _read(config, attention)


def _qwen2_attention(config: ModelFile) -> AttentionConfig:
    return config.attention(qkv_bias=True, rope=config.rope(default_theta=None))


def _read(
    config: ModelFile, attention: AttentionConfig, mlps: Iterable[MLPConfig | ExpertsConfig] | None = None
) -> DecoderConfig:
    """Read `sliding_window`, where `use_sliding_window` is set, for the layers that `layer_types` names
    `sliding_attention`; without `layer_types`, for all layers from `max_window_layers` on. `mlps` None: all are
    dense."""
    dense = config.mlp()
    window = config.window(DEFAULT_WINDOW) if config.get("use_sliding_window", bool, False) else None
    types = config.layer_types(supported=(FULL,) if window is None else (FULL, SLIDING))
    if types is None:
        first = config.get("max_window_layers", int, _DEFAULT_MAX_WINDOW_LAYERS)
        types = [FULL if number < first else SLIDING for number in range(config.num_layers())]
    mixers = {FULL: attention, SLIDING: replace(attention, window=config.bounded(window))}
    return config.decoder(config.layers(types, mixers, dense if mlps is None else mlps))


QWEN2 = Family(
    name="Qwen2, 2.5",
    architectures=("Qwen2ForCausalLM",),
    features="biased queries, keys and values; windows in the later layers where they are switched on",
    examples=("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-Coder-32B-Instruct"),
    read=read_qwen2,
)
QWEN2_VL = Family(
    name="Qwen2-VL",
    architectures=("Qwen2VLForConditionalGeneration",),
    features="Qwen2 with a vision tower; positions of three axes",
    examples=("Qwen/Qwen2-VL-7B-Instruct", "Qwen/Qwen2-VL-2B-Instruct"),
    read=read_qwen2,
    read_vision=read_qwen2_vision,
)
QWEN2_5_VL = Family(
    name="Qwen2.5-VL",
    architectures=("Qwen2_5_VLForConditionalGeneration",),
    features="Qwen2 with a vision tower, which attends within windows; positions of three axes",
    examples=("Qwen/Qwen2.5-VL-7B-Instruct", "allenai/olmOCR-2-7B-1025"),
    read=read_qwen2,
    read_vision=read_qwen2_5_vision,
)
QWEN2_5_OMNI = Family(
    name="Qwen2.5-Omni",
    architectures=(
        "Qwen2_5OmniForConditionalGeneration",
        "Qwen2_5OmniModel",
        "Qwen2_5OmniThinkerForConditionalGeneration",
    ),
    features="Qwen2.5-VL in files that also hold parts for sound and speech, which stay on disk",
    examples=("Qwen/Qwen2.5-Omni-7B", "Qwen/Qwen2.5-Omni-3B"),
    read=read_qwen2,
    read_vision=read_qwen2_5_omni_vision,
    part=_THINKER,
)
QWEN3 = Family(
    name="Qwen3 dense",
    architectures=("Qwen3ForCausalLM",),
    features="normed queries and keys",
    examples=("Qwen/Qwen3-8B", "Qwen/Qwen3-4B-Instruct-2507"),
    read=read_qwen3,
)

LIGHTON_OCR = Family(
    name="LightOnOCR",
    architectures=("LightOnOcrForConditionalGeneration",),
    features="Qwen3 with a vision tower (Pixtral)",
    examples=("lightonai/LightOnOCR-1B-1025",),
    read=read_qwen3,
    read_vision=read_lighton_vision,
)
QWEN3_VL = Family(
    name="Qwen3-VL dense",
    architectures=("Qwen3VLForConditionalGeneration",),
    features="Qwen3 with a vision tower, from several layers of which the decoder reads; positions of three axes",
    examples=("Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-2B-Instruct"),
    read=read_qwen3,
    read_vision=read_qwen3_vision,
)


def read_qwen2_moe(config: ModelFile) -> DecoderConfig:
    """Read Qwen2's attention, with routed experts and a gated shared expert."""
    shared = config.mlp(size_key="shared_expert_intermediate_size")
    return _read(config, _qwen2_attention(config), read_mlps(config, shared=shared, gates_shared=True))


def read_qwen3_moe(config: ModelFile) -> DecoderConfig:
    """Read normed queries and keys, and one window for all layers, or none."""
    window = config.window(DEFAULT_WINDOW) if config.get("use_sliding_window", bool, False) else None
    attention = config.attention(
        qk_norm="head", bias=config.bias(), window=config.bounded(window), rope=config.rope(default_theta=None)
    )
    return config.decoder(LayerConfig(mixer=attention, mlp=mlp) for mlp in read_mlps(config))


def read_mlps(
    config: ModelFile, *, shared: MLPConfig | None = None, gates_shared: bool = False
) -> Iterator[MLPConfig | ExpertsConfig]:
    """Read each layer's MLP: every `decoder_sparse_step`-th layer has experts, except those in `mlp_only_layers`."""
    routing = config.routing(renormalise=config.get("norm_topk_prob", bool, False))
    experts = config.experts(routing, shared=shared, gates_shared=gates_shared)
    return (config.mlp() if is_dense else experts for is_dense in layers_without_experts(config))


def layers_without_experts(config: ModelFile, default: Sequence[int] = ()) -> list[bool]:
    """Read which layers have no experts. `default`: that of `mlp_only_layers`."""
    step = config.positive("decoder_sparse_step", 1)
    without = config.values.get("mlp_only_layers")
    without = list(default) if without is None else without
    if not isinstance(without, list):
        raise config.error("mlp_only_layers", f"{show(without)} is not a list")
    return [number in without or (number + 1) % step != 0 for number in range(config.num_layers())]


def read_qwen3_vl_moe(config: ModelFile) -> DecoderConfig:
    """Read Qwen3 with a mixture of experts, whose files hold stacks of transposed matrices. The weights of a token's
    experts add up to 1."""
    decoder = read_qwen3_moe(config.replacing(norm_topk_prob=True))
    return replace(decoder, layout=replace(decoder.layout, transposes_experts="some"))


QWEN2_MOE = Family(
    name="Qwen2, 1.5 MoE",
    architectures=("Qwen2MoeForCausalLM",),
    features="a mixture of experts, and an expert with a gate that all tokens share",
    examples=("Qwen/Qwen1.5-MoE-A2.7B-Chat", "Qwen/Qwen2-57B-A14B-Instruct"),
    read=read_qwen2_moe,
)
QWEN3_MOE = Family(
    name="Qwen3 MoE",
    architectures=("Qwen3MoeForCausalLM",),
    features="normed queries and keys; a mixture of experts",
    examples=("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-235B-A22B"),
    read=read_qwen3_moe,
)
QWEN3_VL_MOE = Family(
    name="Qwen3-VL MoE",
    architectures=("Qwen3VLMoeForConditionalGeneration",),
    features="Qwen3-VL with a mixture of experts",
    examples=("Qwen/Qwen3-VL-30B-A3B-Instruct",),
    read=read_qwen3_vl_moe,
    read_vision=read_qwen3_vision,
)
QWEN3_OMNI = Family(
    name="Qwen3-Omni",
    architectures=("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"),
    features="Qwen3-VL MoE in files that also hold parts for sound and speech, which stay on disk",
    examples=("Qwen/Qwen3-Omni-30B-A3B-Instruct", "Qwen/Qwen3-Omni-30B-A3B-Thinking"),
    read=read_qwen3_moe,
    read_vision=read_qwen3_omni_vision,
    part=_THINKER,
    defaults={"norm_topk_prob": True},
)
