"""Aria's decoder (https://arxiv.org/abs/2410.05993): Llama's attention, and in every layer a mixture of experts beside
one that all tokens share."""

from __future__ import annotations

from dataclasses import replace

from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import SHARED_EXPERT
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig

_LAYOUT = CheckpointLayout(
    renamed=(
        (".mlp.router.", ".mlp.gate."),
        (".experts.fc1.weight", ".experts.gate_up_proj"),
        (".experts.fc2.weight", ".experts.down_proj"),
        SHARED_EXPERT,
    ),
    transposes_experts="all",
)


def read(config: ModelFile) -> DecoderConfig:
    """Read experts whose weights for a token add up to 1. `hidden_act` and `mlp_bias` are those of the shared expert
    alone."""
    mlp = config.mlp(bias=config.mlp_bias())
    count = config.get("moe_num_shared_experts", int, 2)
    experts = config.experts(
        config.routing(keys=("moe_num_experts",), chosen_key="moe_topk", renormalise=True),
        size_key="intermediate_size",
        activation=ExpertActivation(),
        shared=replace(mlp, intermediate_size=count * mlp.intermediate_size) if count > 0 else None,
    )
    attention = config.attention(bias=config.bias(), rope=config.rope())
    return config.decoder(LayerConfig(mixer=attention, mlp=experts), layout=_LAYOUT)


ARIA = Family(
    name="Aria",
    architectures=("AriaTextForCausalLM", "AriaForConditionalGeneration"),
    features="a mixture of experts, and an expert that all tokens share; its tower is left on disk",
    examples=("rhymes-ai/Aria",),
    read=read,
    keys={"moe_intermediate_size": "intermediate_size"},
    defaults={"moe_num_experts": 8, "moe_topk": 2, "rms_norm_eps": 1e-6},
)
