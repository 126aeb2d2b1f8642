"""LongCat-Flash (https://arxiv.org/abs/2509.01322): each layer of its files has latent attention and an MLP twice, and
a mixture of experts that reads what the first MLP reads, and whose result is added after the second. So it is two
layers of the decoder. Some of the experts return their input."""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.latent_attention import read_latent_attention
from nvcli.models.families.model_file import MAX_EXPERTS, MAX_LAYERS, ModelFile
from nvcli.models.layer_config import SHORTCUT, DecoderConfig, LayerConfig
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.mixers.latent_attention import LatentAttentionConfig
from nvcli.models.mtp_config import LAYER, NORM, MTPConfig, names_of_layer

_HEAD = "model.mtp."
_NAMES_OF_HEAD = (
    (f"{_HEAD}layers.0.transformer_layer.mlp.", f"{LAYER}.mlp."),
    (f"{_HEAD}norm.", f"{NORM}."),
)
_LAYOUT = CheckpointLayout(
    renamed=(
        (".mlp.experts.", f".{SHORTCUT}.experts."),
        (".mlp.router.classifier.", f".{SHORTCUT}.gate."),
        (".mlp.router.", f".{SHORTCUT}.gate."),
        (".mlps.0.", ".mlp.0."),
        (".mlps.1.", ".mlp.1."),
    ),
    parts_per_layer=2,
    undivided=(SHORTCUT,),
    left=(_HEAD,),
)


def read_longcat_flash(config: ModelFile) -> DecoderConfig:
    """Read LongCat-Flash, and its head for multi-token prediction, whose layer has no experts."""
    attention, norm = _attention(config), config.rms_norm()
    plain = LayerConfig(mixer=attention, mlp=config.mlp(size_key="ffn_hidden_size"))
    layers = [replace(plain, shortcut=_experts(config)), plain] * config.positive("num_layers", most=MAX_LAYERS // 2)
    head = None
    if config.get("num_nextn_predict_layers", int, 1) > 0:
        names = *names_of_layer(plain, f"{_HEAD}layers.0.", norm=".m"), *_NAMES_OF_HEAD
        head = MTPConfig(layer=plain, norm=norm, stored_names=names)
    return config.decoder(layers, norm=norm, layout=_LAYOUT, mtp=head)


def _attention(config: ModelFile) -> LatentAttentionConfig:
    """Read the attention, whose latents are scaled to the size that vectors of the hidden size have."""
    attention = read_latent_attention(config, is_interleaved=True)
    hidden_size = config.positive("hidden_size")
    if config.get("mla_scale_kv_lora", bool, True):
        attention = replace(attention, latent_factor=(hidden_size / attention.latent_dim) ** 0.5)
    if attention.query_rank is not None and config.get("mla_scale_q_lora", bool, True):
        attention = replace(attention, query_factor=(hidden_size / attention.query_rank) ** 0.5)
    return attention


def _experts(config: ModelFile) -> ExpertsConfig:
    """Read the experts: those of `zero_expert_num`, which follow the others, return their input."""
    config.only(attention_method="MLA", router_bias=False, zero_expert_type="identity", norm_topk_prob=False)
    identities = config.get("zero_expert_num", int, 0)
    routing = config.routing(
        keys=("n_routed_experts",), chosen_key="moe_topk", scale=config.positive_number("routed_scaling_factor", 1.0)
    )
    most = MAX_EXPERTS - routing.num_experts
    if not 0 <= identities <= most:
        raise config.error("zero_expert_num", f"{identities:,} is not between 0 and {most}")
    return config.experts(
        replace(routing, num_experts=routing.num_experts + identities),
        size_key="expert_ffn_hidden_size",
        num_identities=identities,
        has_correction=True,
        has_wide_router=True,
    )


LONGCAT_FLASH = Family(
    name="LongCat-Flash",
    architectures=("LongcatFlashForCausalLM",),
    features="latent attention; experts beside MLPs on a shortcut, some of which return their input",
    examples=("meituan-longcat/LongCat-Flash-Chat", "meituan-longcat/LongCat-Flash-Thinking"),
    read=read_longcat_flash,
    defaults={"rope_theta": 10_000_000.0, "q_lora_rank": 1536, "kv_lora_rank": 512, "zero_expert_num": 256},
)
