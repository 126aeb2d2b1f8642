"""DeepSeek-V2 (https://arxiv.org/abs/2405.04434) and DeepSeek-V3 (https://arxiv.org/abs/2412.19437), whose shape R1 and
Kimi-K2 have too: latent attention, and a mixture of experts after dense layers. Kimi-K2.5
(https://arxiv.org/abs/2602.02276) has a vision tower. A.X-K1 (https://arxiv.org/abs/2601.09200) norms what its experts
give; Youtu-LLM is dense. In DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556) tokens attend to a choice of keys; A.X-K2
(https://huggingface.co/skt/A.X-K2) also has gates in norms and attention."""

from __future__ import annotations

from dataclasses import replace

from nvcli.kernels.expert_settings import Routing
from nvcli.models.families.deepseek_experts import (
    first_layers_dense,
    layout_without_predictions,
    read_experts,
    read_with_predictions,
    shared_experts,
)
from nvcli.models.families.family import Family
from nvcli.models.families.latent_attention import read_chosen_keys, read_latent_attention, with_indexers
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.attention import OutputGate
from nvcli.models.mixers.latent_attention import LatentAttentionConfig
from nvcli.models.vision.kimi import read_kimi_vision
from nvcli.models.vision.sam import read_deepseek_vision

_AFTER_EXPERTS = "post_mlp_layernorm"
_GATED_NORM = ("layernorm.norm.", "layernorm.")
"""The name of the weight of gated norms in files and in the decoder."""


def read_deepseek_v2(config: ModelFile) -> DecoderConfig:
    """Read DeepSeek-V2, whose experts are chosen by a softmax, without a correction."""
    experts = config.experts(_routing(config), has_wide_router=True, shared=shared_experts(config, "n_shared_experts"))
    attention = read_latent_attention(config, is_interleaved=True)
    layers = (LayerConfig(mixer=attention, mlp=mlp) for mlp in first_layers_dense(config, experts))
    return config.decoder(layers, layout=layout_without_predictions(config))


def read_deepseek_ocr(config: ModelFile) -> DecoderConfig:
    """Read the decoder of DeepSeek-OCR 2: Llama's attention, and DeepSeek-V2's experts in the layers that a list
    names."""
    experts = config.experts(_routing(config), has_wide_router=True, shared=shared_experts(config, "n_shared_experts"))
    attention = config.attention(bias=config.bias(), rope=config.rope())
    layers = (LayerConfig(mixer=attention, mlp=mlp) for mlp in config.mlps(experts, config.sparse_layers()))
    return config.decoder(layers, layout=layout_without_predictions(config))


def _routing(config: ModelFile) -> Routing:
    config.only(norm_topk_prob=False)
    routing = config.routing(
        keys=("n_routed_experts",), scale=config.positive_number("routed_scaling_factor", 1.0), sums_two_best=False
    )
    has_groups = config.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    return config.routing_with_groups(routing) if has_groups else routing


def read_deepseek_v3(config: ModelFile) -> DecoderConfig:
    """Read DeepSeek-V3."""
    return read_with_predictions(config, _attention(config))


def read_deepseek_v32(config: ModelFile) -> DecoderConfig:
    """Read DeepSeek-V3.2, each of whose layers chooses its keys."""
    attention = read_chosen_keys(config, _attention(config), is_interleaved=False)
    return with_indexers(read_with_predictions(config, attention, config.sparse_layers()))


def read_axk1(config: ModelFile) -> DecoderConfig:
    """Read A.X-K1. Its files have the norm after the experts in dense layers too, where nothing reads it, and no
    corrections of the router's scores."""
    config.only(moe_layer_freq=1)
    experts = replace(read_experts(config), may_lack_correction=True)
    dense = LayerConfig(mixer=_attention(config), mlp=config.mlp())
    sparse = replace(dense, mlp=experts, norms=LayerNorms(after_mlp=_AFTER_EXPERTS))
    is_sparse, layout = config.sparse_layers(), layout_without_predictions(config)
    unread = (f"model.layers.{number}.{_AFTER_EXPERTS}." for number, has in enumerate(is_sparse) if not has)
    return config.decoder(
        (sparse if has_experts else dense for has_experts in is_sparse),
        layout=replace(layout, left=(*layout.left, *unread)),
    )


def read_axk2(config: ModelFile) -> DecoderConfig:
    """Read A.X-K2, whose norms before attention and before experts are gated."""
    config.only(moe_layer_freq=1, attention_output_gate=True, gated_norm=True)
    attention = replace(_attention(config), gate=OutputGate(is_in_queries=True))
    mixer = read_chosen_keys(config, attention, is_interleaved=False)
    norms = LayerNorms(gated=("input_layernorm",), gate_rank=config.positive("gated_norm_rank", 16))
    dense = LayerConfig(mixer=mixer, mlp=config.mlp(), norms=norms)
    of_experts = replace(norms, gated=(*norms.gated, "post_attention_layernorm"))
    sparse = replace(dense, mlp=read_experts(config), norms=of_experts)
    layout = layout_without_predictions(config)
    layers = (sparse if has_experts else dense for has_experts in config.sparse_layers())
    return with_indexers(config.decoder(layers, layout=replace(layout, renamed=(*layout.renamed, _GATED_NORM))))


def read_youtu(config: ModelFile) -> DecoderConfig:
    """Read Youtu-LLM."""
    return config.decoder(LayerConfig(mixer=_attention(config), mlp=config.mlp()))


def _attention(config: ModelFile) -> LatentAttentionConfig:
    return read_latent_attention(config, is_interleaved=config.get("rope_interleave", bool, True))


DEEPSEEK_V2 = Family(
    name="DeepSeek-V2",
    architectures=("DeepseekV2ForCausalLM",),
    features="latent attention; a mixture of experts after dense layers, and experts that all tokens share",
    examples=("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct"),
    read=read_deepseek_v2,
    defaults={"q_lora_rank": 1536, "kv_lora_rank": 512},
)
DEEPSEEK_OCR2 = Family(
    name="DeepSeek-OCR 2",
    architectures=("DeepseekOcr2ForConditionalGeneration",),
    features="Llama's attention with DeepSeek-V2's experts; a vision tower (SAM) with queries that read it; tiles",
    examples=("deepseek-community/DeepSeek-OCR-2",),
    read=read_deepseek_ocr,
    read_vision=read_deepseek_vision,
)
DEEPSEEK_V3 = Family(
    name="DeepSeek-V3, R1, Kimi-K2, K2.5",
    architectures=(
        "DeepseekV3ForCausalLM",
        "KimiK25ForConditionalGeneration",
        "Kimi_K25ForConditionalGeneration",
    ),
    features="latent attention; a mixture of experts after dense layers, and a shared one; K2.5 with a vision tower",
    examples=("deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-R1-0528", "moonshotai/Kimi-K2.5"),
    read=read_deepseek_v3,
    read_vision=read_kimi_vision,
    defaults={
        "q_lora_rank": 1536,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
)
DEEPSEEK_V32 = Family(
    name="DeepSeek-V3.2",
    architectures=("DeepseekV32ForCausalLM",),
    features="as DeepSeek-V3; tokens attend to keys that an indexer chooses (DSA)",
    examples=("deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V3.2-Speciale"),
    read=read_deepseek_v32,
    defaults=DEEPSEEK_V3.defaults,
)
AXK1 = Family(
    name="A.X-K1",
    architectures=("AXK1ForCausalLM",),
    features="as DeepSeek-V3, with a norm after the experts",
    examples=("skt/A.X-K1",),
    read=read_axk1,
    defaults={"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
)
AXK2 = Family(
    name="A.X-K2",
    architectures=("AXK2ForCausalLM",),
    features="as DeepSeek-V3.2; gated norms and gated attention",
    examples=("skt/A.X-K2",),
    read=read_axk2,
    defaults={"routed_scaling_factor": 2.5, "index_n_heads": 16},
)
YOUTU = Family(
    name="Youtu-LLM",
    architectures=("YoutuForCausalLM",),
    features="latent attention",
    examples=("tencent/Youtu-LLM-2B",),
    read=read_youtu,
    ties_embeddings=True,
    defaults={"q_lora_rank": 1536, "kv_lora_rank": 512},
)
