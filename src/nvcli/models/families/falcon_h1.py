"""Falcon-H1 (https://arxiv.org/abs/2507.22448): Mamba-2 and attention side by side in every layer, with multipliers.

Multipliers of a projection's input or output become factors of its weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.families.bamba import LAYOUT, NORMS
from nvcli.models.families.family import Family
from nvcli.models.families.mamba import read_mamba
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.mamba import MambaConfig

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
