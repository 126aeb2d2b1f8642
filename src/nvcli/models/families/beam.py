"""Beam (https://huggingface.co/reflection/Beam-1.0-501B-A23B): gated attention with windows, full without rotary
positions in every sixth layer, and experts from the best groups.

The n-th block's result is added as h_n = b_n / √n + h_(n-1) × √((n - 1) / n), where n begins with 2. So the stream is
kept times √n, and blocks add their outputs as they are; the epsilons of the norms that read it are multiplied by n.
"""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import read_experts
from nvcli.models.families.family import Family
from nvcli.models.families.gemma import NORMS_ON_BOTH_SIDES
from nvcli.models.families.model_file import FULL, SLIDING, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import AttentionConfig, OutputGate, QueryScaling
from nvcli.models.mixers.mixer import NormConfig

_LAYOUT = CheckpointLayout(renamed=((".self_attn.gate_proj", ".self_attn.g_proj"),))


def read(config: ModelFile) -> DecoderConfig:
    """Read kinds of layers; by default the last one has full attention too, and the first three have no experts."""
    attention = {kind: _attention(config, kind) for kind in (FULL, SLIDING)}
    experts = read_experts(config)
    last = config.num_layers() - 1
    kinds = config.layer_kinds(lambda number: (number + 1) % 6 == 0 or number == last)
    mlps = config.mlps(experts, config.sparse_layers(default=3))
    eps = config.positive_number("rms_norm_eps", 1e-6)
    layers = (
        LayerConfig(
            mixer=attention[kind],
            mlp=mlp,
            norms=replace(NORMS_ON_BOTH_SIDES, epsilons=(eps * (2 * number + 1), eps, eps * (2 * number + 2), eps)),
        )
        for number, (kind, mlp) in enumerate(zip(kinds, mlps, strict=True))
    )
    return config.decoder(
        layers,
        norm=NormConfig(eps=eps),
        last_norm=NormConfig(eps=eps * (2 * last + 3)),
        logit_soft_cap=config.optional_number("final_logit_softcapping", 30.0),
        layout=_LAYOUT,
    )


def _attention(config: ModelFile, kind: str) -> AttentionConfig:
    """Read one kind of attention: it rotates, or its queries grow with their position."""
    window = config.window_of(kind, 512)
    attention = config.attention(
        window=window,
        qk_norm="head",
        bias=config.bias(),
        gate=OutputGate(has_bias=True),
        rope=config.rope(layer_type=kind),
    )
    ropes = config.object("rope_parameters")
    if ropes.has(kind) or (kind == SLIDING and not ropes.values):
        return attention
    return replace(attention, rope=None, query_scaling=QueryScaling(beta=0.1, length=2048, offset=1, is_power=True))


BEAM = Family(
    name="Beam",
    architectures=("BeamForCausalLM",),
    features="gated attention, full without rotary positions in every sixth layer; a mixture of experts",
    examples=("reflection/Beam-1.0-501B-A23B",),
    read=read,
    defaults={"head_dim": 128, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
)
