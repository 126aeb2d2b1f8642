"""Phi-1.5 (https://arxiv.org/abs/2309.05463) and Phi-2: attention and MLP side by side, biases everywhere. Phi-3
(https://arxiv.org/abs/2404.14219) and Phi-4: fused projections, partial rotary positions, longrope; and Phi-3.5-MoE,
with LayerNorm, biases and experts that SparseMixer weighs."""

from __future__ import annotations

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.mistral import MIXTRAL_NAMES
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.mixer import NormConfig

_LAYOUT_OF_PHI = CheckpointLayout(
    starts=(("model.final_layernorm.", "model.norm."), ("final_layernorm.", "model.norm.")),
    renamed=((".self_attn.dense.", ".self_attn.o_proj."), (".fc1.", ".up_proj."), (".fc2.", ".down_proj.")),
)


def read_phi(config: ModelFile) -> DecoderConfig:
    """Read half-rotated heads, and a bias of the LM head too."""
    config.only(qk_layernorm=False)
    layer = LayerConfig(
        mixer=config.attention(bias=True, rope=config.rope(default_partial=0.5)),
        mlp=config.plain_mlp("gelu_new", bias=True),
        norms=LayerNorms(before_mlp=None),
    )
    return config.decoder(layer, norm=config.layer_norm(), layout=_LAYOUT_OF_PHI, has_head_bias=True)


def read(config: ModelFile) -> DecoderConfig:
    """Read one window for all layers, or none. Runs of up to `original_max_position_embeddings` tokens use longrope's
    short factors, and runs of longer ones (`max_model_len`) use its long factors."""
    layer = LayerConfig(
        mixer=config.attention(window=config.bounded(config.window()), rope=config.rope()), mlp=config.mlp()
    )
    return config.decoder(layer)


def read_moe(config: ModelFile) -> DecoderConfig:
    """Read the experts, of which SparseMixer gives each token two."""
    config.only(num_experts_per_tok=2)
    tolerance = 2 * config.positive_number("router_jitter_noise", 0.01)
    experts = config.experts(config.routing(scoring="sparsemixer", tolerance=tolerance), size_key="intermediate_size")
    attention = config.attention(
        window=config.bounded(config.window()), bias=config.bias(), rope=config.rope(1_000_000.0)
    )
    return config.decoder(
        LayerConfig(mixer=attention, mlp=experts),
        norm=NormConfig(eps=config.positive_number("rms_norm_eps"), kind="layer", has_bias=True),
        has_head_bias=config.get("lm_head_bias", bool, False),
        layout=CheckpointLayout(renamed=MIXTRAL_NAMES),
    )


PHI = Family(
    name="Phi-1.5, Phi-2",
    architectures=("PhiForCausalLM",),
    features="attention and MLP side by side, LayerNorm and biases everywhere",
    examples=("microsoft/phi-2", "microsoft/phi-1_5"),
    read=read_phi,
)
PHI3 = Family(
    name="Phi-3, Phi-4",
    architectures=("Phi3ForCausalLM",),
    features="fused projections, partial rotary positions, longrope by max_model_len",
    examples=("microsoft/phi-4", "microsoft/Phi-4-mini-instruct", "microsoft/Phi-3.5-mini-instruct"),
    read=read,
    defaults={"original_max_position_embeddings": 4096},
)
PHI_MOE = Family(
    name="Phi-3.5-MoE",
    architectures=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    features="a mixture of experts by SparseMixer, LayerNorm, biases, longrope by max_model_len",
    examples=("microsoft/Phi-3.5-MoE-instruct", "microsoft/Phi-mini-MoE-instruct"),
    read=read_moe,
)
