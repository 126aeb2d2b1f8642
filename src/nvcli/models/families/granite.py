"""Granite 3 and the dense Granite 4 (https://arxiv.org/abs/2505.08699): Llama's layers with four multipliers.

A block's output is multiplied by `residual_multiplier` before it is added to the residual stream. A norm does not
depend on the scale of its input, except through its epsilon: so the stream is kept divided by that number instead, and
blocks add their outputs as they are.
"""

from __future__ import annotations

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import PLAIN_LAYOUT, CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import FULL, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.mixers.mlp import MLPConfig

_HYBRID_LAYOUT = CheckpointLayout(
    renamed=(("shared_mlp.input_linear.", "mlp.gate_up_proj."), ("shared_mlp.output_linear.", "mlp.down_proj."))
)


def read_granite(config: ModelFile) -> DecoderConfig:
    """Read Granite 3."""
    config.layer_types(supported=(FULL,))
    attention = _attention(config, rotates=True)
    return _read(config, attention, config.mlp(bias=config.get("mlp_bias", bool, False)), PLAIN_LAYOUT)


def read_granite4(config: ModelFile) -> DecoderConfig:
    """Read a dense Granite 4: all layers are attention, and none has experts."""
    kinds = config.values.get("layer_types") or config.values.get("layers_block_type")
    if not isinstance(kinds, list) or any(kind not in ("attention", FULL) for kind in kinds):
        raise config.error("layer_types", f"{show(kinds)}: only the dense models, all of attention, are supported")
    if config.get("num_local_experts", int, 8):
        raise config.error("num_local_experts", "experts are not supported here; supported: 0")
    sizes = {**config.values, "intermediate_size": config.positive("shared_intermediate_size")}
    mlp = config.with_values(sizes).mlp()
    rotates = config.values.get("position_embedding_type") == "rope"
    return _read(config, _attention(config, rotates=rotates), mlp, _HYBRID_LAYOUT)


def _attention(config: ModelFile, *, rotates: bool) -> AttentionConfig:
    bias = config.bias()
    scale = config.positive_number("attention_multiplier", 1.0)
    if rotates:
        return config.attention(default_theta=10_000.0, scale=scale, qkv_bias=bias, o_bias=bias)
    return config.attention(default_theta=None, rope=lambda _: None, scale=scale, qkv_bias=bias, o_bias=bias)


def _read(config: ModelFile, attention: AttentionConfig, mlp: MLPConfig, layout: CheckpointLayout) -> DecoderConfig:
    residual = config.positive_number("residual_multiplier", 1.0)
    return config.decoder(
        LayerConfig(mixer=attention, mlp=mlp),
        norm=NormConfig(eps=config.positive_number("rms_norm_eps") / residual**2),
        embedding_scale=config.positive_number("embedding_multiplier", 1.0) / residual,
        logit_scale=1 / config.positive_number("logits_scaling", 1.0),
        layout=layout,
    )


GRANITE = Family(
    name="Granite 3",
    architectures=("GraniteForCausalLM",),
    features="multipliers of embeddings, residuals, scores and logits",
    examples=("ibm-granite/granite-3.3-8b-instruct",),
    read=read_granite,
)
GRANITE4 = Family(
    name="Granite 4 dense",
    architectures=("GraniteMoeHybridForCausalLM",),
    features="as Granite 3; not the models with Mamba layers or experts",
    examples=("ibm-granite/granite-4.0-micro", "ibm-granite/granite-4.0-1b"),
    read=read_granite4,
)
