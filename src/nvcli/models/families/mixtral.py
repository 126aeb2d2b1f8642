"""Mixtral (https://arxiv.org/abs/2401.04088): experts of the layer's full intermediate size in every layer."""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.reading import bounded, num_layers, read_attention, read_decoder, read_window
from nvcli.models.families.reading_experts import read_experts, read_routing
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig

_LAYOUT = CheckpointLayout(
    renamed=(
        (".block_sparse_moe.", ".mlp."),
        (".w1.", ".gate_proj."),
        (".w3.", ".up_proj."),
        (".w2.", ".down_proj."),
    )
)


def read(config: JsonFile) -> DecoderConfig:
    """Read one window for all layers, or none. The weights of a token's experts add up to 1."""
    attention = read_attention(config, default_theta=1_000_000.0, window=bounded(read_window(config), config))
    experts = read_experts(config, read_routing(config, renormalise=True), size_key="intermediate_size")
    decoder = read_decoder(config, [LayerConfig(mixer=attention, mlp=experts)] * num_layers(config))
    return replace(decoder, layout=_LAYOUT)


MIXTRAL = Family(
    name="Mixtral",
    architectures=("MixtralForCausalLM",),
    features="a mixture of experts",
    examples=("mistralai/Mixtral-8x7B-Instruct-v0.1", "mistralai/Mixtral-8x22B-Instruct-v0.1"),
    read=read,
)
