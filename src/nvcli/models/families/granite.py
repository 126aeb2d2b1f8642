"""Granite 3 and 4 (https://arxiv.org/abs/2505.08699): Llama's layers with four multipliers, and in Granite 4 with
Mamba-2 in place of attention in most layers.

A block's output is multiplied by `residual_multiplier` before it is added to the residual stream. A norm does not
depend on the scale of its input, except through its epsilon: so the stream is kept divided by that number instead, and
blocks add their outputs as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import PLAIN_LAYOUT, CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.mamba import ATTENTION, MAMBA, read_mamba
from nvcli.models.families.model_file import FULL, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.mixers.mixer import Mixer, NormConfig
from nvcli.models.mixers.mlp import MLPConfig

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
    config.layer_types(supported=(FULL,))
    attention = _attention(config, rotates=True)
    mlp = config.mlp(bias=config.get("mlp_bias", bool, False))
    return _read(config, [attention] * config.num_layers(), mlp, PLAIN_LAYOUT)


def read_granite4(config: ModelFile) -> DecoderConfig:
    """Read Granite 4: layers of Mamba-2 or attention, each with an MLP, and in the larger models with experts, whose
    weights for a token add up to 1, beside it."""
    attention = _attention(config, rotates=config.values.get("position_embedding_type") == "rope")
    mixers = [attention if kind in ATTENTION else read_mamba(config) for kind in _layer_types(config)]
    dense = config.mlp(size_key="shared_intermediate_size")
    if not config.get("num_local_experts", int, 8):
        return _read(config, mixers, dense, _DENSE_LAYOUT)
    routing = config.routing(keys=("num_local_experts",), renormalise=True)
    experts = config.experts(routing, size_key="intermediate_size", shared=dense)
    return _read(config, mixers, experts, _EXPERTS_LAYOUT)


def _layer_types(config: ModelFile) -> list[str]:
    """Read which layers have attention; by default none has."""
    key = next(filter(config.has, ("layer_types", "layers_block_type")), None)
    kinds = ["mamba"] * config.num_layers() if key is None else config.values[key]
    known = (*ATTENTION, *MAMBA)
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds) or len(kinds) != config.num_layers():
        raise config.error(
            key or "layer_types",
            f"{show(kinds)} is not a list of {' and '.join(known)} for {config.num_layers()} layers",
        )
    return kinds


def _attention(config: ModelFile, *, rotates: bool) -> AttentionConfig:
    bias = config.bias()
    scale = config.positive_number("attention_multiplier", 1.0)
    if rotates:
        return config.attention(scale=scale, bias=bias)
    return config.attention(rope=lambda _: None, scale=scale, bias=bias)


def _read(
    config: ModelFile, mixers: Sequence[Mixer], mlp: MLPConfig | ExpertsConfig, layout: CheckpointLayout
) -> DecoderConfig:
    residual = config.positive_number("residual_multiplier", 1.0)
    return config.decoder(
        [LayerConfig(mixer=mixer, mlp=mlp) for mixer in mixers],
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
    name="Granite 4",
    architectures=("GraniteMoeHybridForCausalLM",),
    features="as Granite 3; Mamba-2 layers between layers of attention; a mixture of experts in the larger models",
    examples=("ibm-granite/granite-4.0-h-small", "ibm-granite/granite-4.0-micro"),
    read=read_granite4,
)
