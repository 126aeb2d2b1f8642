"""Models with Mamba layers and attention: Bamba (https://huggingface.co/blog/bamba), with Mamba-2 in most layers,
attention in a few, and a gated MLP in each; Falcon-H1 (https://arxiv.org/abs/2507.22448), with both side by side in
every layer; and Jamba (https://arxiv.org/abs/2403.19887), with Mamba-1 in most layers, attention without positions in a
few, and experts after some of them.

Multipliers of a projection's input or output (Falcon-H1) become factors of its weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.mamba import read_mamba
from nvcli.models.families.model_file import MAX_LAYERS, ModelFile
from nvcli.models.families.pure_mamba import NAMES, read_layer
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.mamba import MambaConfig
from nvcli.models.mixers.mixer import FeedForward

LAYOUT = CheckpointLayout(
    renamed=((".feed_forward.", ".mlp."), ("model.final_layernorm.", "model.norm.")),
)
NORMS = LayerNorms(before_mlp="pre_ff_layernorm")


def read_bamba(config: ModelFile) -> DecoderConfig:
    """Read Bamba: the layers of `attn_layer_indices` have attention, of which half of each head is rotated."""
    bias, mlp = config.bias(), config.mlp(bias=config.mlp_bias())
    attention = config.attention(bias=bias, rope=config.rope(default_partial=0.5))
    indices, count = config.values.get("attn_layer_indices"), config.num_layers()
    if not isinstance(indices, list) or any(index not in range(count) for index in indices):
        raise config.error("attn_layer_indices", f"{show(indices)} is not a list of some of {count} layers")
    mamba = read_mamba(config)
    mixers = [attention if number in indices else mamba for number in range(count)]
    layers = [LayerConfig(mixer=mixer, mlp=mlp, norms=NORMS) for mixer in mixers]
    return config.decoder(layers, layout=LAYOUT)


BAMBA = Family(
    name="Bamba",
    architectures=("BambaForCausalLM",),
    features="Mamba-2 layers between layers of attention",
    examples=("ibm-ai-platform/Bamba-9B-v2",),
    read=read_bamba,
)


_SECTIONS = ("z", "x", "B", "C", "dt")
"""Sections of the input projection of Mamba, in the order of their multipliers."""


def read_falcon_h1(config: ModelFile) -> DecoderConfig:
    """Read Falcon-H1. Raises LoadError for biases of projections, which no published model has: multipliers differ in
    whether they apply to them."""
    config.only(attention_bias=False, mlp_bias=False, mamba_proj_bias=False, projectors_bias=False)
    attention = config.attention(rope=config.rope())
    # Keys are kept without their multiplier, which scores have as well.
    attention = replace(attention, scale=attention.scale * config.positive_number("key_multiplier", 1.0))
    layer = LayerConfig(mixer=attention, beside=_mamba(config), mlp=config.mlp(), norms=NORMS)
    return config.decoder(
        layer,
        embedding_scale=config.positive_number("embedding_multiplier", 1.0),
        logit_scale=config.positive_number("lm_head_multiplier", 1.0),
        weight_factors=tuple((name, factor) for name, factor in _factors(config) if factor != 1.0),
        layout=LAYOUT,
    )


def _mamba(config: ModelFile) -> MambaConfig:
    mamba = read_mamba(config, config.positive("mamba_d_ssm") if config.has("mamba_d_ssm") else None)
    if not config.get("mamba_rms_norm", bool, False):
        return replace(mamba, norm=None)
    is_before = config.get("mamba_norm_before_gate", bool, True)
    return replace(mamba, norm="before gate" if is_before else "after gate")


def _factors(config: ModelFile) -> Iterator[tuple[str, float]]:
    """Yield the factor of each weight that multipliers apply to."""
    of_attention = config.positive_number("attention_in_multiplier", 1.0)
    for name in ("q_proj", "k_proj", "v_proj"):
        yield f"self_attn.{name}", of_attention
    yield "self_attn.o_proj", config.positive_number("attention_out_multiplier", 1.0)
    of_mamba = config.positive_number("ssm_in_multiplier", 1.0)
    for section, factor in zip(_SECTIONS, _multipliers(config, "ssm_multipliers", len(_SECTIONS)), strict=True):
        yield f"mamba.in_proj_{section}", of_mamba * factor
    yield "mamba.out_proj", config.positive_number("ssm_out_multiplier", 1.0)
    of_gate, of_down = _multipliers(config, "mlp_multipliers", 2)
    yield "mlp.gate_proj", of_gate
    yield "mlp.down_proj", of_down


def _multipliers(config: ModelFile, key: str, count: int) -> list[float]:
    """Read a list of `count` multipliers; if it is absent, all are 1."""
    values = config.values.get(key)
    if values is None:
        return [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        raise config.error(key, f"{show(values)} is not a list of {count} numbers")
    numbered = config.with_values({f"{key}[{number}]": value for number, value in enumerate(values)})
    return [numbered.positive_number(name) for name in numbered.values]


FALCON_H1 = Family(
    name="Falcon-H1",
    architectures=("FalconH1ForCausalLM",),
    features="Mamba-2 and attention side by side; multipliers",
    examples=("tiiuae/Falcon-H1-34B-Instruct",),
    read=read_falcon_h1,
)


_LAYOUT = CheckpointLayout(
    renamed=(
        (".feed_forward.router.", ".mlp.gate."),
        (".feed_forward.", ".mlp."),
        ("model.final_layernorm.", "model.norm."),
        *NAMES,
    ),
)


def read_jamba(config: ModelFile) -> DecoderConfig:
    """Read Jamba: of every few layers, one has attention, and one has experts if there are several."""
    attention = config.attention(rope=None)
    expanded = config.positive("mamba_expand", 2) * config.positive("hidden_size")
    mamba = read_layer(config, num_channels=expanded, norm_eps=config.positive_number("rms_norm_eps"))
    has_attention, is_sparse = _every(config, "attn_layer", 8, 4), _every(config, "expert_layer", 2, 1)
    mlps: list[FeedForward] = [config.mlp()] * len(is_sparse)
    if config.positive("num_experts", 16) > 1:
        mlps = [*config.mlps(config.experts(config.routing(), size_key="intermediate_size"), is_sparse)]
    mixers = [attention if found else mamba for found in has_attention]
    layers = [LayerConfig(mixer=mixer, mlp=mlp, norms=NORMS) for mixer, mlp in zip(mixers, mlps, strict=True)]
    return config.decoder(layers, layout=_LAYOUT)


def _every(config: ModelFile, name: str, default_period: int, default_offset: int) -> list[bool]:
    """Read which layers are special ones: one of every period, at an offset."""
    period = config.positive(f"{name}_period", default_period, most=MAX_LAYERS)
    key = f"{name}_offset"
    offset = config.get(key, int, default_offset)
    if not 0 <= offset < period:
        raise config.error(key, f"{offset} is not from 0 to {period - 1}, below `{name}_period`")
    return [number % period == offset for number in range(config.num_layers())]


JAMBA = Family(
    name="Jamba",
    architectures=("JambaForCausalLM",),
    features="Mamba-1 layers between layers of attention without positions; a mixture of experts in some layers, or in "
    "none",
    examples=("ai21labs/AI21-Jamba-Reasoning-3B", "ai21labs/AI21-Jamba-Mini-1.7"),
    read=read_jamba,
)
