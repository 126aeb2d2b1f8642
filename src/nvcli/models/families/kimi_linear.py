"""Kimi Linear (https://arxiv.org/abs/2510.26692): Kimi Delta Attention between layers of latent attention without
rotary positions, and the experts of DeepSeek-V3 after dense layers."""

from __future__ import annotations

from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.families.deepseek_experts import layout_without_predictions, read_experts
from nvcli.models.families.family import Family
from nvcli.models.families.latent_attention import read_latent_attention
from nvcli.models.families.mistral import MIXTRAL_NAMES
from nvcli.models.families.model_file import FULL, LINEAR, ModelFile
from nvcli.models.layer_config import DecoderConfig
from nvcli.models.mixers.kimi_delta import KimiDeltaConfig

SECTION = "linear_attn_config"
"""The part of config.json for Kimi Delta Attention."""
NAMES_OF_DELTA = ((".forget_gate.", "."), (".self_attn.conv1d.", ".self_attn.qkv_conv1d."))
"""Names of a layer's tensors in files of transformers, and in the decoder."""
KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Names of keys in published files, and those that are read."""
_COMPUTED: dict[str, str | int | bool] = {
    "attn_res_block_size": 0,
    "mla_use_nope": True,
    "mla_use_output_gate": False,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "routed_expert_hidden_size": 0,
}
"""Keys of which one value alone is computed; later models have others."""


def read_kimi_linear(config: ModelFile) -> DecoderConfig:
    """Read the published file, or one of transformers."""
    config.only(**_COMPUTED)
    config.object(SECTION).only(use_full_rank_gate=False, gate_lower_bound=False)
    attention = read_latent_attention(config, is_interleaved=False)
    mixers = {FULL: replace(attention, rope=None), LINEAR: read_delta(config)}
    experts, kinds = read_experts(config), _layer_types(config)
    layers = config.layers(kinds, mixers, config.mlps(experts, config.sparse_layers()))
    layout = layout_without_predictions(config)
    return config.decoder(layers, layout=replace(layout, renamed=(*layout.renamed, *MIXTRAL_NAMES, *NAMES_OF_DELTA)))


def read_delta(config: ModelFile) -> KimiDeltaConfig:
    """Read the heads and the convolution, which published files have in a section of their own."""
    section = config.object(SECTION)
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    names["short_conv_kernel_size"] = "linear_conv_kernel_dim"
    found = {key: (section, key) if section.has(key) else (config, own) for key, own in names.items()}
    (of_dim, dim_key), (of_heads, heads_key), (of_taps, taps_key) = found.values()
    return KimiDeltaConfig(
        num_heads=of_heads.positive(heads_key),
        head_dim=of_dim.positive(dim_key, most=256),
        conv_taps=of_taps.conv_taps(taps_key),
    )


def read_lowest_decay(config: ModelFile, key: str) -> float:
    """Read the lower bound of the logarithms of decays, by default -5."""
    lowest = config.get(key, float, -5.0)
    if lowest >= 0:
        raise config.error(key, f"{lowest:g} is not below zero")
    return lowest


def _layer_types(config: ModelFile) -> list[str]:
    """Read `layer_types`; if they are absent, the lists of layers, which are counted from 1."""
    types = config.layer_types(supported=(FULL, LINEAR))
    if types is not None:
        return types
    section, count = config.object(SECTION), config.num_layers()
    kinds: dict[int, str] = {}
    for key, kind in (("kda_layers", LINEAR), ("full_attn_layers", FULL)):
        numbers = section.values.get(key)
        if not isinstance(numbers, list):
            raise section.error(key, f"{show(numbers)} is not a list")
        kinds |= {number: kind for number in numbers if isinstance(number, int)}
    if [*sorted(kinds)] != [*range(1, count + 1)]:
        raise section.error("kda_layers", f"with `full_attn_layers`, it does not name layers 1 to {count}")
    return [kinds[number] for number in range(1, count + 1)]


KIMI_LINEAR = Family(
    name="Kimi Linear",
    architectures=("KimiLinearForCausalLM",),
    features="Kimi Delta Attention between layers of latent attention without rotary positions; a mixture of experts "
    "after dense layers, and experts that all tokens share",
    examples=("moonshotai/Kimi-Linear-48B-A3B-Instruct",),
    read=read_kimi_linear,
    keys=KEYS,
)
