"""DeepSeek-V2 (https://arxiv.org/abs/2405.04434) and DeepSeek-V3 (https://arxiv.org/abs/2412.19437), whose shape R1 and
Kimi-K2 have too: latent attention, and a mixture of experts after dense layers."""

from __future__ import annotations

from nvcli.kernels.expert_settings import Routing
from nvcli.models.families.deepseek_experts import (
    first_layers_dense,
    layout_without_predictions,
    read_with_predictions,
    shared_experts,
)
from nvcli.models.families.family import Family
from nvcli.models.families.latent_attention import read_latent_attention
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig


def read_deepseek_v2(config: ModelFile) -> DecoderConfig:
    """Read DeepSeek-V2, whose experts are chosen by a softmax, without a correction."""
    experts = config.experts(_routing(config), has_wide_router=True, shared=shared_experts(config, "n_shared_experts"))
    attention = read_latent_attention(config, is_interleaved=True)
    layers = (LayerConfig(mixer=attention, mlp=mlp) for mlp in first_layers_dense(config, experts))
    return config.decoder(layers, layout=layout_without_predictions(config))


def _routing(config: ModelFile) -> Routing:
    config.only("norm_topk_prob", False)
    routing = config.routing(
        keys=("n_routed_experts",), scale=config.positive_number("routed_scaling_factor", 1.0), sums_two_best=False
    )
    has_groups = config.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    return config.routing_with_groups(routing) if has_groups else routing


def read_deepseek_v3(config: ModelFile) -> DecoderConfig:
    """Read DeepSeek-V3."""
    attention = read_latent_attention(config, is_interleaved=config.get("rope_interleave", bool, True))
    return read_with_predictions(config, attention)


DEEPSEEK_V2 = Family(
    name="DeepSeek-V2",
    architectures=("DeepseekV2ForCausalLM",),
    features="latent attention; a mixture of experts after dense layers, and experts that all tokens share",
    examples=("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct"),
    read=read_deepseek_v2,
    defaults={"q_lora_rank": 1536, "kv_lora_rank": 512},
)
DEEPSEEK_V3 = Family(
    name="DeepSeek-V3, R1, Kimi-K2",
    architectures=("DeepseekV3ForCausalLM",),
    features="latent attention; a mixture of experts after dense layers, and an expert that all tokens share",
    examples=("deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-R1-0528"),
    read=read_deepseek_v3,
    defaults={
        "q_lora_rank": 1536,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
)
