"""Muse Glimmer (https://huggingface.co/meta-models/Muse-Glimmer-30B): gated attention with windows, full without rotary
positions in every fourth layer, norms on both sides of each block, and normed embeddings."""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.gemma import NORMS_ON_BOTH_SIDES
from nvcli.models.families.model_file import SLIDING, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import OutputGate

_LAYOUT = CheckpointLayout(renamed=((".self_attn.gate_proj", ".self_attn.g_proj"),))
_FULL_INTERVAL = 4


def read(config: ModelFile) -> DecoderConfig:
    """Read the text part. By default the last layer and every fourth one before it has full attention and does not
    rotate. Weights of the layers' norms are stored as differences from 1; those of heads and embeddings have none."""
    count = config.num_layers()
    is_full = [(count - 1 - number) % _FULL_INTERVAL == 0 for number in range(count)]
    kinds = config.layer_kinds(lambda number: is_full[number])
    attention = config.attention(
        scale=config.positive_number("qk_scale_factor", 3.87) * config.head_dim() ** -0.5,
        qk_norm="head",
        weighs_norms=False,
        bias=config.bias(),
        gate=OutputGate(),
        rope=config.rope(),
    )
    window = config.bounded(config.window(2048))
    mlp = config.mlp(key="hidden_activation")
    norm = config.rms_norm(weight_offset=1.0)
    eps_after = config.positive_number("post_norm_eps", 1e-8)
    norms = replace(NORMS_ON_BOTH_SIDES, epsilons=(norm.eps, eps_after, norm.eps, eps_after))
    layers = (
        LayerConfig(
            mixer=replace(
                attention,
                rope=attention.rope if rotates else None,
                window=window if kind == SLIDING else None,
            ),
            mlp=mlp,
            norms=norms,
        )
        for kind, rotates in zip(kinds, _rotating_layers(config, is_full), strict=True)
    )
    return config.decoder(
        layers,
        norm=norm,
        last_norm=config.rms_norm(),
        norms_embeddings=True,
        logit_scale=config.positive_number("output_multiplier", 26**-0.5),
        logit_soft_cap=config.optional_number("final_logit_softcapping", 20.0),
        layout=_LAYOUT,
    )


def _rotating_layers(config: ModelFile, is_full: list[bool]) -> list[bool]:
    """Read `layer_rope_theta`, of which, as in transformers, only zeros count: those layers do not rotate."""
    thetas = config.of_layers("layer_rope_theta")
    return [not full for full in is_full] if thetas is None else [theta != 0 for theta in thetas]


MUSE_GLIMMER = Family(
    name="Muse Glimmer",
    architectures=("MuseGlimmerForConditionalGeneration",),
    features="gated attention, full without rotary positions in every fourth layer; text alone",
    examples=("meta-models/Muse-Glimmer-30B",),
    read=read,
)
