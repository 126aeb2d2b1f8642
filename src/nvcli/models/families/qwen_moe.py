"""The mixtures of experts of Qwen2 (https://arxiv.org/abs/2407.10671) and Qwen3 (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nvcli.models.families.family import Family
from nvcli.models.families.mistral import DEFAULT_WINDOW
from nvcli.models.families.qwen import read_qwen2
from nvcli.models.families.reading import bounded, num_layers, read_attention, read_decoder, read_mlp, read_window
from nvcli.models.families.reading_experts import read_experts, read_routing, with_mlps
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.mixers.mlp import MLPConfig
from nvcli.validation import show


def read_qwen2_moe(config: JsonFile) -> DecoderConfig:
    """Read Qwen2's attention, and experts beside one that all tokens share, which has a gate."""
    shared = replace(read_mlp(config), intermediate_size=config.positive("shared_expert_intermediate_size"))
    return with_mlps(read_qwen2(config), read_mlps(config, shared=shared, gates_shared=True))


def read_qwen3_moe(config: JsonFile) -> DecoderConfig:
    """Read normed queries and keys, and one window for all layers, or none."""
    bias = config.get("attention_bias", bool, False)
    window = read_window(config, DEFAULT_WINDOW) if config.get("use_sliding_window", bool, False) else None
    attention = read_attention(
        config, default_theta=None, qk_norm="head", qkv_bias=bias, o_bias=bias, window=bounded(window, config)
    )
    return read_decoder(config, (LayerConfig(mixer=attention, mlp=mlp) for mlp in read_mlps(config)))


def read_mlps(
    config: JsonFile, *, shared: MLPConfig | None = None, gates_shared: bool = False
) -> Iterator[MLPConfig | ExpertsConfig]:
    """Read each layer's MLP: every `decoder_sparse_step`-th layer has experts, but for those of `mlp_only_layers`."""
    routing = read_routing(config, renormalise=config.get("norm_topk_prob", bool, False))
    experts = read_experts(config, routing, shared=shared, gates_shared=gates_shared)
    step = config.positive("decoder_sparse_step") if config.values.get("decoder_sparse_step") is not None else 1
    without = config.values.get("mlp_only_layers") or []
    if not isinstance(without, list):
        raise config.error("mlp_only_layers", f"{show(without)} is not a list")
    for number in range(num_layers(config)):
        is_dense = number in without or (number + 1) % step
        yield read_mlp(config) if is_dense else experts


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
